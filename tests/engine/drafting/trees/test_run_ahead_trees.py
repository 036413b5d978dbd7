"""Trees that grow on: whatever was computed ahead, interrupted or guessed wrong, the drafts are right."""

import random
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.drafting.model import next_tokens
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.trees import tree_drafter
from engine.drafting.trees.levelwise import TIP
from engine.drafting.trees.run_ahead_trees import RunAheadTreeDrafter
from engine.drafting.trees.tree_drafter import TreeDrafter
from engine.params import SamplingParams
from engine.verification.decider import paths
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import Advanced, Counting, context_model, finish, propose, row
from tests.engine.drafting.trees.test_tree_drafter import PARAMS, check, scores_after
from tests.engine.running import make_engine, run
from tests.fakes import ContextModel, LateModel

MODEL = context_model(1)
LAWS = [context_model(seed, sharpness=2).laws.log() for seed in (1, 2)]
ALIKE = ContextModel((LAWS[0] + 0.7 * LAWS[1]).softmax(-1), [1])
"""Much like the model, but not the same."""


def config(**settings):
    return EngineConfig(
        **{"num_blocks": 1000, "block_size": 4, "max_num_batched_tokens": 24, "drafting": "tree", **settings}
    )


def ahead(model=MODEL, **settings):
    """A drafter for which the clock stands still: no measured time says that a level is not worth waiting for."""
    return RunAheadTreeDrafter(DraftModel(model), config(**settings), clock=lambda: 0.0)


def target_path(text, draft, params, model=MODEL):
    """What a target that is `model` commits: the nodes on its path, and the token after them."""
    node, tokens = -1, []
    while True:
        token = int(scores_after(model, text, tokens, params).argmax())
        tokens.append(token)
        pairs = enumerate(zip(draft.parents, draft.token_ids, strict=True))
        node = next((child for child, edge in pairs if edge == (node, token)), None)
        if node is None:
            return tokens


@pytest.mark.parametrize("num_blocks", [1000, 120, 60], ids=["much room", "little room", "hardly any room"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_every_node_follows_its_own_path(params, num_blocks):
    """Six requests with verdicts of every kind, the drafter interrupted anywhere.

    As in a worker, what is committed is appended to the lists that the rows came with, and a request may be missing
    from a proposal, or end or be forgotten at any time.
    """
    chance = random.Random(num_blocks)
    drafter = ahead(num_blocks=num_blocks)
    texts = {str(i): [chance.randrange(2, VOCAB) for _ in range(chance.randrange(3, 40))] for i in range(6)}
    num_drafted = 0
    for _ in range(50):
        names = [name for name in texts if chance.random() < 0.8]
        rows = [row(texts[name], chance.choice([0, 1, 3, 8, 8]), name=name, params=params) for name in names]
        shared = [
            replace(one, request=replace(one.request, token_ids=texts[name]))
            for name, one in zip(names, rows, strict=True)
        ]
        drafts = propose(drafter, *shared)
        for one, draft in zip(rows, drafts, strict=True):
            assert len(draft.token_ids) <= one.num_draft_tokens
            check(draft, one.request.token_ids, params, MODEL)
            num_drafted += bool(draft.token_ids)
        if chance.random() < 0.1:
            drafter.release(chance.choice(list(texts)))
        for _ in range(chance.choice([0, 1, 3, 5, 100])):
            drafter.advance()
        if chance.random() < 0.1:
            drafter.release(chance.choice(list(texts)))
        for name, draft in zip(names, drafts, strict=True):
            outcome = chance.random()
            if outcome < 0.5:
                texts[name] += target_path(texts[name], draft, params)
            elif outcome < 0.9:
                texts[name] += [*chance.choice(paths(draft)), chance.randrange(2, VOCAB)]
        for name in sorted(texts.keys() - set(names)):
            texts[name] += [chance.randrange(2, VOCAB) for _ in range(chance.choice([0, 1, 12]))]
        for _ in range(chance.choice([0, 0, 2])):
            drafter.advance()
    assert num_drafted > (100 if num_blocks == 1000 else 20)
    assert drafter.stats.hits > (30 if num_blocks == 1000 else 3)
    assert min(drafter.stats.misses[reason] for reason in ("token", "unprepared", "stale")) > 3
    assert drafter.stats.num_wasted < drafter.stats.num_forwards
    for name in texts:
        drafter.release(name)
    assert len(drafter.cache.free_blocks) == num_blocks
    assert not drafter._trees


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["noise"]], ids=["greedy", "noise"])
def test_a_draft_is_that_of_a_fresh_drafter(params, num_steps, monkeypatch):
    """Node by node, and its options are those that would be computed anew; what was learned is kept out of it."""
    monkeypatch.setattr(next_tokens, "_STEP", 0.0)
    drafter, texts = ahead(), {str(i): [5 + i, 9, 4, 2, 30 + i] for i in range(3)}
    for turn in range(10):
        rows = [row(text, name=name, params=params) for name, text in texts.items()]
        fresh = TreeDrafter(DraftModel(MODEL), config())
        drafts = propose(drafter, *rows)
        assert drafts == propose(fresh, *rows)
        for name, tree in drafter._trees.items():
            assert tree.base == len(texts[name])
            for drafted, options in options_by_path(tree).items():
                expected = scores_after(MODEL, texts[name], drafted, params).topk(10)
                assert options.token_ids == expected.indices.tolist()
                assert options.scores == pytest.approx(expected.values.tolist())
        for _ in range(num_steps):
            drafter.advance()
        for (name, text), draft in zip(texts.items(), drafts, strict=True):
            text += [7] if name == "0" and turn % 3 == 2 else target_path(text, draft, params, ALIKE)
    assert drafter.stats.hits > (5 if num_steps > 1 else -1)
    assert drafter.stats.misses["token"] > 2


@pytest.mark.parametrize("num_steps", [0, 1, 3, 100])
def test_entries_of_a_real_model_are_moved_to_their_places(draft, num_steps):
    """What follows a node by entries that were moved, perhaps often, is what follows it by entries computed anew."""
    drafter = RunAheadTreeDrafter(DraftModel(draft), config(), clock=lambda: 0.0)
    chance = random.Random(num_steps)
    text, num_compared = [5, 9, 4, 2, 30], 0
    for _ in range(12):
        (proposed,) = propose(drafter, row(text, 6))
        fresh = TreeDrafter(DraftModel(draft), config())
        propose(fresh, row(text, 6))
        expected = options_by_path(fresh.tree_of("a"))
        for path, options in options_by_path(drafter._trees["a"]).items():
            if path in expected:
                assert options.scores == pytest.approx(expected[path].scores, abs=1e-3)
                num_compared += 1
        for _ in range(num_steps):
            drafter.advance()
        path = max(paths(proposed), key=len) if chance.random() < 0.7 else chance.choice(paths(proposed))
        text += path or [7]
    assert num_compared > 20
    assert drafter.stats.hits > (3 if num_steps > 1 else -1)


def options_by_path(tree):
    """The options after each node, by the tokens from the tip to it."""
    return {
        tuple(tree.nodes[step].token_id for step in tree.nodes[node].path): options
        for node, options in tree.next_tokens.items()
    }


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 7, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_device_that_computes_while_the_host_goes_on_drafts_the_same(temperature, num_steps):
    """Requests come before, in and after passes that are under way, of which there is one at most."""
    chance = random.Random(num_steps)
    model, params = LateModel(MODEL), SamplingParams(temperature=temperature, seed=5)
    drafter, text = ahead(model), [5, 9, 4]
    propose(drafter, row(text, 0, params=params))
    for turn in range(12):
        model.num_under_way = 0
        for _ in range(num_steps):
            drafter.advance()
        assert model.num_under_way <= 1
        (draft,) = propose(drafter, row(text, 5, params=params))
        check(draft, text, params, MODEL)
        assert len(draft.token_ids) == 5
        text += target_path(text, draft, params) if turn % 4 else [chance.randrange(2, VOCAB)]
    assert drafter.stats.hits > (5 if num_steps > 2 else -1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_like_the_draft_is_always_foreseen_at_the_cost_of_hardly_a_pass(temperature):
    model, params = Counting(MODEL), SamplingParams(temperature=temperature, seed=5)
    drafter, text = ahead(model), [5, 9, 4]
    propose(drafter, row(text, 0, params=params))  # as in a round that computes the prompt
    (draft,) = propose(drafter, row(text, 0, params=params))
    num_late = []
    for _ in range(10):
        finish(drafter)
        text = [*text, *target_path(text, draft, params)]
        model.passes.clear()
        (draft,) = propose(drafter, row(text, params=params))
        num_late.append(len(model.passes))
        check(draft, text, params, MODEL)
        assert len(draft.token_ids) == 4
    if temperature == 0:
        assert sum(num_late) == 0
        assert (drafter.stats.hits, drafter.stats.misses, drafter.stats.num_wasted) == (10, {}, 0)
    else:  # paths that the draft holds for very unlikely are not prepared for
        assert sum(num_late) <= 15
        assert drafter.stats.hits >= 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_as_many_tokens_are_accepted_as_of_trees_that_are_drafted_after_the_verdict(temperature, monkeypatch):
    monkeypatch.setattr(next_tokens, "_STEP", 0.0)
    requests = [
        ([5 + i, 9, 4], SamplingParams(temperature=temperature, seed=i, max_tokens=60, ignore_eos=True))
        for i in range(12)
    ]
    target, draft = context_model(1, sharpness=2), context_model(1, sharpness=3)
    drafters = {
        "after": lambda config: TreeDrafter(DraftModel(draft), config),
        "ahead": lambda config: Advanced(RunAheadTreeDrafter(DraftModel(draft), config, clock=lambda: 0.0), 6),
    }
    accepted = {}
    for name, make in drafters.items():
        engine = make_engine(target, make, num_speculative_tokens=8, drafting="tree")
        run(engine, requests)
        accepted[name] = engine.stats.mean_acceptance_length
    stats = engine.drafter.drafter.stats
    assert accepted["ahead"] == pytest.approx(accepted["after"])
    assert stats.hits > 0.7 * (stats.hits + sum(stats.misses.values()))


@pytest.mark.parametrize("is_absent", [False, True])
def test_blocks_that_a_tree_took_ahead_are_free_again_for_a_request_that_needs_them(is_absent):
    """Whether the tree's request is in the proposal, with a verdict that was not foreseen, or is not."""
    drafter, text = ahead(num_blocks=12), [5, 9, 4, 8, 7, 6, 5, 3]
    propose(drafter, row(text))
    finish(drafter)
    assert len(drafter.cache.free_blocks) < 2
    tree = drafter._trees["a"]
    text.append(next(token for token in range(2, VOCAB) if tree.child(TIP, token) is None))
    others = [] if is_absent else [row(text)]
    *_, draft = propose(drafter, *others, row(range(10, 26), name="b"))
    assert len(draft.token_ids) == 4
    assert len(drafter.cache.prefixes["a"].token_ids) >= 8, "it is not evicted for the other request"


def test_no_more_nodes_are_computed_ahead_than_may_be(monkeypatch):
    monkeypatch.setattr(tree_drafter, "_LEAST_PROBABILITY", 0.0)
    drafter = ahead()
    propose(drafter, row([5, 9, 4], 8))
    finish(drafter)
    assert drafter._trees["a"].num_computed == 128


def test_no_node_is_computed_beyond_the_context():
    model = Counting(MODEL)
    limit = 12

    class Short(Counting):
        info = replace(MODEL.info, max_model_len=limit)

        def run(self, batch, draws=None):
            assert int(batch.positions.max()) < limit
            return super().run(batch, draws)

    model, text = Short(MODEL), [5, 9, 4, 8]
    drafter = ahead(model)
    while len(text) < limit:
        k = min(4, limit - len(text))
        (draft,) = propose(drafter, row(text, k))
        finish(drafter)
        assert len(draft.token_ids) == k
        text.append(target_path(text, draft, PARAMS["greedy"])[0])
    assert propose(drafter, row(text, 1))[0].token_ids == []
    assert drafter.stats.hits > 5


@pytest.mark.parametrize("is_advanced", [True, False])
def test_rows_that_hit_do_not_wait_for_one_that_misses(is_advanced, monkeypatch):
    """The answer comes before any pass and before entries are moved; the next drafts are right, whenever they come."""
    model = Counting(MODEL)
    drafter = ahead(model)
    texts = {name: [first, 9, 4] for first, name in enumerate("abcdefgh", 10)}

    def rows():
        return [row(text, name=name) for name, text in texts.items()]

    drafts = propose(drafter, *rows())
    finish(drafter)
    for (name, text), draft in zip(texts.items(), drafts, strict=True):
        text += [1] if name == "d" else target_path(text, draft, PARAMS["greedy"])
    monkeypatch.setattr(drafter._pace, "slowdown", lambda num_steps: 1 + num_steps)
    moves, move = [], drafter.cache.kv.move
    monkeypatch.setattr(drafter.cache.kv, "move", lambda *slots: (moves.append(slots), move(*slots)))
    model.passes.clear()
    drafts = propose(drafter, *rows())
    assert [len(draft.token_ids) for draft in drafts] == [0 if name == "d" else 4 for name in texts]
    assert (model.passes, moves) == ([], [])
    assert drafter.has_time
    if is_advanced:
        finish(drafter)
        assert moves, "the entries are moved afterwards"
    monkeypatch.setattr(drafter._pace, "slowdown", lambda num_steps: 1.0)
    for _ in range(3):
        for text, draft in zip(texts.values(), drafts, strict=True):
            text += target_path(text, draft, PARAMS["greedy"])
        drafts = propose(drafter, *rows())
        for name, draft in zip(texts, drafts, strict=True):
            assert len(draft.token_ids) == 4
            check(draft, texts[name], PARAMS["greedy"], MODEL)


def test_levels_are_late_only_while_that_pays(monkeypatch):
    model = Counting(MODEL)
    drafter, text = ahead(model), [5, 9, 4]
    drafted = {}
    for slowdown in (1.0, 1.2, 3.0):
        monkeypatch.setattr(drafter._pace, "slowdown", lambda num_steps, now=slowdown: now)
        drafter.release("a")
        model.passes.clear()
        (draft,) = propose(drafter, row(text, 8))
        drafted[slowdown] = len(model.passes), len(draft.token_ids)
    assert drafted[1.0][0] > drafted[1.2][0] > drafted[3.0][0] == 1, "one pass in any case, where no row has a draft"
    assert drafted[1.0][1] == 8
    assert drafted[3.0][1] == 3


def test_passes_are_narrower_where_too_little_is_prepared_and_wider_where_time_is_left():
    now = [100.0]
    drafter, text = RunAheadTreeDrafter(DraftModel(MODEL), config(), clock=lambda: now[0]), [5, 9, 4]
    widths = []
    for num_passes in (0, 0, 100, 100, 100):
        (draft,) = propose(drafter, row(text))
        widths.append(drafter._pace.width)
        for _ in range(num_passes):
            now[0] += 0.0001
            drafter.advance()
        now[0] += 0.5
        text += target_path(text, draft, PARAMS["greedy"])
    assert widths[0] > widths[1] > widths[2] < widths[3] < widths[4]


def test_rounds_are_measured_only_where_a_verdict_came():
    """A request whose prompt is still being computed comes again without one."""
    now = [100.0]
    drafter = RunAheadTreeDrafter(DraftModel(MODEL), config(), clock=lambda: now[0])
    shared = row([5, 9, 4], 0)  # as in a worker, its tokens are appended in place
    for tokens, gap in ([], None), ([], None), ([7], pytest.approx(0.2)):
        shared.request.token_ids.extend(tokens)
        propose(drafter, shared)
        assert drafter._pace._gap_s == gap
        now[0] += 0.2


@pytest.mark.parametrize("length", [4, 60], ids=["tips are computed", "one chunk of a prompt is computed"])
def test_a_request_that_ends_while_its_tree_grows_leaves_the_others_growing(length):
    model = Counting(MODEL)
    drafter = ahead(model)
    texts = {"a": [5, 9, 4], "b": [6, 9, 4, 7], "c": list(range(3, 3 + length))}
    params = PARAMS["greedy"]
    propose(drafter, *(row(text, 0, name=name) for name, text in texts.items()))
    drafter.advance()
    drafter.release("c")
    model.passes.clear()
    drafter.advance()
    assert model.passes[0] <= 2 * 8, "nothing more is computed of its prompt"
    finish(drafter)
    for name in "ab":
        texts[name].append(int(scores_after(MODEL, texts[name], [], params).argmax()))
    for name, draft in zip("ab", propose(drafter, *(row(texts[name], name=name) for name in "ab")), strict=True):
        check(draft, texts[name], params, MODEL)
    assert drafter.stats.hits == 2
    assert set(drafter.cache.prefixes) == {"a", "b"}


def test_a_request_that_ends_before_its_entries_are_moved_is_forgotten():
    drafter, text = ahead(), [5, 9, 4]
    free = len(drafter.cache.free_blocks)
    (draft,) = propose(drafter, row(text))
    finish(drafter)
    text += target_path(text, draft, PARAMS["greedy"])
    propose(drafter, row(text))
    assert drafter._unsettled
    drafter.release("a")
    finish(drafter)
    assert len(drafter.cache.free_blocks) == free


def test_a_failure_ahead_costs_only_what_was_prepared():
    class Failing(Counting):
        fails = False

        def run(self, batch, draws=None):
            if self.fails:
                raise RuntimeError("out of memory")
            return super().run(batch, draws)

    model = Failing(MODEL)
    drafter, text = ahead(model), [5, 9, 4]
    (draft,) = propose(drafter, row(text))
    text += target_path(text, draft, PARAMS["greedy"])
    propose(drafter, row(text))
    model.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        finish(drafter)
    drafter.forget()
    model.fails = False
    for _ in range(3):
        (draft,) = propose(drafter, row(text))
        check(draft, text, PARAMS["greedy"], MODEL)
        assert len(draft.token_ids) == 4
        finish(drafter)
        text += target_path(text, draft, PARAMS["greedy"])
    assert drafter.stats.misses["stale"] == 2
