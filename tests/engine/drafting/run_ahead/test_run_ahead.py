"""Running ahead, of chains and of trees: whatever was prepared, interrupted or guessed wrong, the drafts are right."""

import random
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.drafting.trees import tree_drafter
from engine.drafting.trees.levelwise import TIP
from engine.drafting.trees.run_ahead_trees import RunAheadTreeDrafter
from engine.params import SamplingParams
from engine.verification.decider import paths
from engine.verification.rule import RULES
from tests.engine.conftest import VOCAB
from tests.engine.drafting import proposing
from tests.engine.drafting.proposing import (
    GREEDY,
    PARAMS,
    Counting,
    Failing,
    context_model,
    finish,
    propose,
    row,
    target_path,
)
from tests.fakes import LateModel, run_ahead

MODEL, K = context_model(1), 4


def config(**settings):
    return EngineConfig(**{"num_blocks": 1000, "block_size": 4, "max_num_batched_tokens": 24} | settings)


def check_chain(draft, text, params, verification="coupled"):
    """The draft may be short, but never other than that of a drafter that remembers nothing."""
    fresh = ModelDrafter(DraftModel(MODEL), config(verification=verification))
    count, right = len(draft.token_ids), propose(fresh, row(text, 8, params=params))[0]
    assert (draft.token_ids, draft.parents) == (right.token_ids[:count], right.parents[:count])
    if RULES[verification].needs_draft_rows and count:
        assert (draft.top_ids, draft.top_probs) == (right.top_ids[:count], right.top_probs[:count])


def check_tree(draft, text, params, verification="coupled"):
    proposing.check(draft, text, params, MODEL)


DRAFTERS = {"chains": RunAheadDrafter, "trees": RunAheadTreeDrafter}
CHECKS = {"chains": check_chain, "trees": check_tree}
of_both_shapes = pytest.mark.parametrize("shape", DRAFTERS)


def make(shape, model=MODEL, clock=lambda: 0.0, **settings: Any):
    """A drafter for which the clock stands still: no measured time says that a draft is not worth waiting for."""
    return DRAFTERS[shape](DraftModel(model), config(**settings), clock=clock)


def committed(text, draft, params):
    return target_path(text, draft, params, MODEL)


CASES = [
    *(("trees", name, "coupled", num_blocks) for name in PARAMS for num_blocks in (1000, 60)),
    ("chains", "greedy", "coupled", 1000),
    ("chains", "noise", "coupled", 120),
    ("chains", "noise", "rejection", 1000),
    ("chains", "penalties", "coupled", 1000),
    ("chains", "penalties", "block", 120),
]


@pytest.mark.parametrize(("shape", "params", "verification", "num_blocks"), CASES)
def test_drafts_are_right_whatever_was_prepared_or_interrupted(shape, params, verification, num_blocks):
    """As in a worker, committed tokens are appended to the rows' lists, and requests may end or be forgotten."""
    chance, params = random.Random(num_blocks), PARAMS[params]
    drafter = make(shape, num_blocks=num_blocks, verification=verification, num_speculative_tokens=8)
    texts = {str(i): [chance.randrange(2, VOCAB) for _ in range(chance.randrange(3, 40))] for i in range(6)}
    num_drafted = 0
    for _ in range(50):
        names = [name for name in texts if chance.random() < 0.8]
        rows = [row(texts[name], chance.choice([0, 1, 3, 8, 8]), name=name, params=params) for name in names]
        shared = [
            replace(proposal, request=replace(proposal.request, token_ids=texts[name]))
            for name, proposal in zip(names, rows, strict=True)
        ]
        drafts = propose(drafter, *shared)
        for proposal, draft in zip(rows, drafts, strict=True):
            assert len(draft.token_ids) <= proposal.num_draft_tokens
            CHECKS[shape](draft, proposal.request.token_ids, params, verification)
            num_drafted += bool(draft.token_ids)
        for count in (chance.choice([0, 1, 3, 5, 100]), chance.choice([0, 0, 2])):
            if chance.random() < 0.1:
                drafter.release(chance.choice(list(texts)))
            for _ in range(count):
                run_ahead(drafter)
        for name, draft in zip(names, drafts, strict=True):
            outcome = chance.random()
            if outcome < 0.5:
                texts[name] += committed(texts[name], draft, params)
            elif outcome < 0.9:
                texts[name] += [*chance.choice(paths(draft)), chance.randrange(2, VOCAB)]
        for name in sorted(texts.keys() - set(names)):
            texts[name] += [chance.randrange(2, VOCAB) for _ in range(chance.choice([0, 1, 12]))]
    assert num_drafted > (100 if num_blocks == 1000 else 20)
    assert drafter.stats.hits > (10 if num_blocks == 1000 else 1)
    assert min(drafter.stats.misses[reason] for reason in ("token", "unprepared", "stale")) > 3
    assert 0 < drafter.stats.num_wasted < drafter.stats.num_forwards
    for name in texts:
        drafter.release(name)
    assert len(drafter.cache.free_blocks) == num_blocks


@of_both_shapes
@pytest.mark.parametrize("num_steps", [0, 1, 3, 100])
def test_a_device_that_computes_while_the_host_goes_on_drafts_the_same(shape, num_steps):
    """Requests come before, in and after passes that are under way, of which there is one at most."""
    chance, model, params = random.Random(num_steps), LateModel(MODEL), SamplingParams(temperature=1.0, seed=5)
    drafter, text = make(shape, model), [5, 9, 4]
    propose(drafter, row(text, 0, params=params))
    for turn in range(12):
        model.num_under_way = 0
        for _ in range(num_steps):
            run_ahead(drafter)
        assert model.num_under_way <= 1
        (draft,) = propose(drafter, row(text, K, params=params))
        CHECKS[shape](draft, text, params)
        assert len(draft.token_ids) == K
        text += committed(text, draft, params) if turn % 4 else [chance.randrange(2, VOCAB)]
    assert drafter.stats.hits > (0 if num_steps > 3 else -1)


@of_both_shapes
def test_a_verdict_that_was_foreseen_costs_no_pass(shape):
    model = Counting(MODEL)
    drafter, text = make(shape, model), [5, 9, 4]
    for _ in range(2):  # as in a round that computes the prompt
        (draft,) = propose(drafter, row(text, 0))
    for _ in range(8):
        finish(drafter)
        text = [*text, *committed(text, draft, GREEDY)]
        model.passes.clear()
        (draft,) = propose(drafter, row(text))
        assert model.passes == []
        assert len(draft.token_ids) == K
        CHECKS[shape](draft, text, GREEDY)
    assert (drafter.stats.hits, drafter.stats.misses, drafter.stats.num_wasted) == (8, {}, 0)


@of_both_shapes
@pytest.mark.parametrize("is_advanced", [True, False])
def test_rows_that_hit_do_not_wait_for_one_that_misses(shape, is_advanced, monkeypatch):
    """The answer comes before any pass and before entries are moved; the next drafts are right, whenever they come."""
    model = Counting(MODEL)
    drafter = make(shape, model)
    texts = {name: [first, 9, 4] for first, name in enumerate("abcdefgh", 10)}

    def rows():
        return [row(text, name=name) for name, text in texts.items()]

    drafts = propose(drafter, *rows())
    finish(drafter)
    for (name, text), draft in zip(texts.items(), drafts, strict=True):
        text += [1] if name == "d" else committed(text, draft, GREEDY)
    monkeypatch.setattr(drafter._pace, "slowdown", lambda num_steps: 1 + num_steps)
    moves, move = [], drafter.cache.kv.move
    monkeypatch.setattr(drafter.cache.kv, "move", lambda *slots: (moves.append(slots), move(*slots)))
    model.passes.clear()
    drafts = propose(drafter, *rows())
    assert [len(draft.token_ids) for draft in drafts] == [0 if name == "d" else K for name in texts]
    assert (model.passes, moves) == ([], [])
    if is_advanced:
        finish(drafter)
        assert moves, "the entries are moved afterwards"
    monkeypatch.setattr(drafter._pace, "slowdown", lambda num_steps: 1.0)
    for _ in range(2):
        for text, draft in zip(texts.values(), drafts, strict=True):
            text += committed(text, draft, GREEDY)
        drafts = propose(drafter, *rows())
        for name, draft in zip(texts, drafts, strict=True):
            assert len(draft.token_ids) == K
            CHECKS[shape](draft, texts[name], GREEDY)


@of_both_shapes
def test_a_failure_ahead_costs_only_what_was_prepared(shape):
    model = Failing(MODEL)
    drafter, text = make(shape, model), [5, 9, 4]
    (draft,) = propose(drafter, row(text))
    model.num_left = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        finish(drafter)
    drafter.forget()
    for _ in range(3):
        text += committed(text, draft, GREEDY)
        (draft,) = propose(drafter, row(text))
        CHECKS[shape](draft, text, GREEDY)
        assert len(draft.token_ids) == K
        finish(drafter)
    assert drafter.stats.misses["stale"] == 2


@of_both_shapes
def test_rounds_are_measured_only_where_a_verdict_came(shape):
    """A request whose prompt is still being computed comes again without a verdict."""
    now = [100.0]
    drafter = make(shape, clock=lambda: now[0])
    shared = row([5, 9, 4], 0)
    for tokens, gap in ([], None), ([], None), ([7], pytest.approx(0.2)):
        shared.request.token_ids.extend(tokens)
        propose(drafter, shared)
        drafter.settle()
        assert drafter._pace._gap_s == gap
        now[0] += 0.2


def test_tokens_that_end_the_text_are_not_prepared_for():
    drafter = make("chains")
    propose(drafter, row([5, 9, 4], 0, params=SamplingParams(temperature=0, logit_bias={1: 100.0})))
    finish(drafter)
    assert all(token != 1 for _, token in drafter._contexts["a"].verdicts)


@pytest.mark.parametrize(
    ("num_missing", "is_busy", "is_narrower"),
    [(1, False, True), (0, True, True), (0, False, False), (-1, True, False)],  # the last one with another group's pass
)
def test_branches_are_fewer_after_a_round_that_waited_for_one_step_or_its_end(num_missing, is_busy, is_narrower):
    now, model = [100.0], Counting(MODEL)
    model.is_busy = False
    drafter, text = make("chains", model, lambda: now[0]), [5, 9, 4]
    propose(drafter, row(text, 0))
    for _ in range(1 + K - num_missing):  # the first call predicts the verdicts
        run_ahead(drafter)
    width, model.is_busy = drafter._pace.width, is_busy
    now[0] += 0.01
    propose(drafter, row([*text, *committed(text, propose(make("chains"), row(text, 0))[0], GREEDY)]))
    assert (drafter._pace.width < width) == is_narrower


def test_trees_are_narrower_where_too_little_is_prepared_and_wider_where_time_is_left():
    now = [100.0]
    drafter, text, widths = make("trees", clock=lambda: now[0]), [5, 9, 4], []
    for num_passes in (0, 0, 100, 100, 100):
        (draft,) = propose(drafter, row(text))
        widths.append(drafter._pace.width)
        for _ in range(num_passes):
            now[0] += 0.0001
            run_ahead(drafter)
        now[0] += 0.5
        text += committed(text, draft, GREEDY)
    assert widths[0] > widths[1] > widths[2] < widths[3] < widths[4]


@pytest.mark.parametrize("is_absent", [False, True])
def test_blocks_that_a_tree_took_ahead_are_free_again_for_a_request_that_needs_them(is_absent):
    """Whether the tree's request is in the proposal, with a verdict that was not foreseen, or is not."""
    drafter, text = make("trees", num_blocks=12), [5, 9, 4, 8, 7, 6, 5, 3]
    propose(drafter, row(text))
    finish(drafter)
    assert len(drafter.cache.free_blocks) < 2
    tree = drafter._trees["a"]
    text.append(next(token for token in range(2, VOCAB) if tree.child(TIP, token) is None))
    *_, draft = propose(drafter, *([] if is_absent else [row(text)]), row(range(10, 26), name="b"))
    assert len(draft.token_ids) == K
    assert len(drafter.cache.prefixes["a"].token_ids) >= 8, "it is not evicted for the other request"


def test_no_more_nodes_are_computed_ahead_than_may_be_and_none_beyond_the_context(monkeypatch):
    monkeypatch.setattr(tree_drafter, "_LEAST_PROBABILITY", 0.0)
    drafter = make("trees")
    propose(drafter, row([5, 9, 4], 8))
    finish(drafter)
    assert drafter._trees["a"].num_computed == 128

    class Short(Counting):
        info = replace(MODEL.info, max_model_len=12)

        def run(self, batch, draws=None):
            assert int(batch.positions.max()) < 12
            return super().run(batch, draws)

    drafter, text = make("trees", Short(MODEL)), [5, 9, 4, 8]
    while len(text) <= 12:
        (draft,) = propose(drafter, row(text, min(4, max(12 - len(text), 1))))
        finish(drafter)
        assert len(draft.token_ids) == min(4, 12 - len(text))
        text.append(committed(text, draft, GREEDY)[0])
    assert drafter.stats.hits > 5
