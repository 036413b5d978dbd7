"""Running ahead: whatever was prepared, interrupted or guessed wrong, the drafts are those of a fresh drafter."""

import random
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.params import SamplingParams
from engine.verification.rule import RULES
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import GREEDY, Advanced, Counting, context_model, finish, propose, row
from tests.engine.running import make_engine, run
from tests.fakes import InterruptedDrafter, LateModel

K = 4


MODEL = context_model(1)


def config(**settings):
    return EngineConfig(
        **{"num_blocks": 1000, "block_size": 4, "max_num_batched_tokens": 24, "num_speculative_tokens": K, **settings}
    )


def next_token(token_ids, params):
    """The likeliest next token by the draft itself: what a target much like it would draw."""
    return propose(ModelDrafter(DraftModel(MODEL), config()), row(token_ids, 1, params=params))[0].token_ids[0]


@pytest.mark.parametrize("num_blocks", [1000, 120], ids=["much room", "little room"])
@pytest.mark.parametrize("verification", RULES)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=0.8, seed=3, presence_penalty=0.5, repetition_penalty=1.3, min_tokens=9),
        SamplingParams(temperature=1.0, seed=4, top_k=2),
    ],
    ids=["greedy", "sampled", "penalties", "few tokens"],
)
def test_what_was_prepared_is_what_a_fresh_drafter_draws(params, verification, num_blocks):
    """Six requests with verdicts of every kind, the drafter interrupted anywhere; a draft may be short, never other.

    As in a worker, what is committed is appended to the lists that the rows came with, and a request may end or be
    forgotten at any time.
    """
    chance = random.Random(1)
    settings = config(verification=verification, num_blocks=num_blocks)
    drafter = RunAheadDrafter(DraftModel(MODEL), settings)
    texts = {str(i): [chance.randrange(2, VOCAB) for _ in range(chance.randrange(3, 40))] for i in range(6)}
    for _ in range(60):
        names = [name for name in texts if chance.random() < 0.8]
        rows = [row(texts[name], chance.choice([0, 1, 3, K, K]), name=name, params=params) for name in names]
        current = [replace(proposal.request, token_ids=texts[proposal.request.request_id]) for proposal in rows]
        shared = [replace(proposal, request=request) for proposal, request in zip(rows, current, strict=True)]
        drafts = propose(drafter, *shared)
        fresh = propose(ModelDrafter(DraftModel(MODEL), config(verification=verification)), *rows)
        if chance.random() < 0.1:
            drafter.release(chance.choice(list(texts)))
        for proposed, right in zip(drafts, fresh, strict=True):
            count = len(proposed.token_ids)
            assert proposed.token_ids == right.token_ids[:count]
            assert proposed.parents == right.parents[:count]
            if RULES[verification].needs_draft_rows and count:
                assert proposed.top_ids == right.top_ids[:count]
                assert proposed.top_probs == right.top_probs[:count]
        for _ in range(chance.choice([0, 1, 3, 5, 100])):
            drafter.advance()
        for name, proposed in zip(names, fresh, strict=True):
            accepted = proposed.token_ids[: chance.randrange(len(proposed.token_ids) + 1)]
            texts[name] += accepted
            is_foreseen = chance.random() < 0.5
            texts[name].append(next_token(texts[name], params) if is_foreseen else chance.randrange(2, VOCAB))
    assert drafter.stats.hits > (10 if num_blocks == 1000 else 1)
    assert min(drafter.stats.misses[reason] for reason in ("token", "unprepared", "stale")) > 5
    assert 0 < drafter.stats.num_wasted < drafter.stats.num_forwards
    for name in texts:
        drafter.release(name)
    assert len(drafter.cache.free_blocks) == settings.num_blocks


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 7, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_device_that_computes_while_the_host_goes_on_drafts_the_same(temperature, num_steps):
    """Requests come before, in and after passes that are under way, of which there is one at most."""
    chance = random.Random(num_steps)
    model, params = LateModel(MODEL), SamplingParams(temperature=temperature, seed=5)
    drafter, text = RunAheadDrafter(DraftModel(model), config()), [5, 9, 4]
    propose(drafter, row(text, 0, params=params))
    for _ in range(12):
        model.num_under_way = 0
        for _ in range(num_steps):
            drafter.advance()
        assert model.num_under_way <= 1
        text.append(next_token(text, params) if chance.random() < 0.7 else chance.randrange(2, VOCAB))
        (draft,) = propose(drafter, row(text, K, params=params))
        (fresh,) = propose(ModelDrafter(DraftModel(MODEL), config()), row(text, K, params=params))
        assert draft.token_ids == fresh.token_ids[: len(draft.token_ids)]
        text += draft.token_ids[: chance.randrange(len(draft.token_ids) + 1)]
    assert drafter.stats.hits > 0 or num_steps <= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_verdict_that_was_foreseen_costs_no_pass(temperature):
    model, params = Counting(MODEL), SamplingParams(temperature=temperature, seed=5)
    drafter, text = RunAheadDrafter(DraftModel(model), config()), [5, 9, 4]
    propose(drafter, row(text, 0, params=params))  # as in a round that computes the prompt
    drafted = []
    for _ in range(8):
        finish(drafter)
        text = [*text, *drafted]
        text.append(next_token(text, params))
        model.passes.clear()
        drafted = propose(drafter, row(text, K, params=params))[0].token_ids
        assert model.passes == []
        assert drafted == propose(ModelDrafter(DraftModel(MODEL), config()), row(text, K, params=params))[0].token_ids
    assert (drafter.stats.hits, drafter.stats.misses, drafter.stats.num_wasted) == (8, {}, 0)


def test_a_target_like_the_draft_is_foreseen_from_the_first_round_on():
    drafter = RunAheadDrafter(DraftModel(MODEL), config())

    prompts = [[2 + i, 3, 5, 7 + i] for i in range(8)]
    requests = [(p, SamplingParams(seed=i, max_tokens=40, ignore_eos=True)) for i, p in enumerate(prompts)]
    engine = make_engine(MODEL, lambda _: Advanced(drafter, 10**6), num_speculative_tokens=K)
    texts = run(engine, requests)
    assert texts == run(make_engine(MODEL, num_speculative_tokens=0), requests)
    assert drafter.stats.misses == {}
    assert drafter.stats.hits == engine.stats.num_drafts
    assert len(drafter.cache.free_blocks) == 1000


def test_a_cache_without_room_prepares_nothing_and_drafts_all_the_same():
    drafter = RunAheadDrafter(DraftModel(MODEL), config(num_blocks=5))
    text = [5, 9, 4, 8, 7]
    for _ in range(3):
        drafts = propose(drafter, row(text))
        assert drafts == propose(ModelDrafter(DraftModel(MODEL), config()), row(text))
        finish(drafter)
        text += [*drafts[0].token_ids[:1], 7]
    assert drafter.stats.num_forwards == 0


def test_tokens_that_end_the_text_are_not_prepared_for():
    drafter, params = RunAheadDrafter(DraftModel(MODEL), config()), SamplingParams(temperature=0, logit_bias={1: 100.0})
    propose(drafter, row([5, 9, 4], 0, params=params))
    finish(drafter)
    assert all(token != 1 for _, token in drafter._contexts["a"].verdicts)


def test_an_early_verdict_gets_the_missing_tokens_drawn():
    chance = random.Random(2)
    # The clock stands still: no measured time says that drawing them is not worth the wait.
    drafter, text = InterruptedDrafter(RunAheadDrafter(DraftModel(MODEL), config(), clock=lambda: 0.0)), [5, 9, 4]
    for _ in range(40):
        [draft] = propose(drafter, row(text))
        assert draft == propose(ModelDrafter(DraftModel(MODEL), config()), row(text))[0]
        accepted = chance.choice([1, K, K])
        text += draft.token_ids[:accepted]
        text.append(next_token(text, row(text).request.params) if accepted == K else 7)
    assert drafter.drafter.stats.hits > 10


def test_rows_that_hit_do_not_wait_for_one_that_misses(monkeypatch):
    """The answer comes before any pass and before the cache is brought up to date; the next draft is still right."""
    model = Counting(MODEL)
    drafter = RunAheadDrafter(DraftModel(model), config())
    texts = {name: [chance, 9, 4] for chance, name in enumerate("abcdefgh", 10)}

    def rows():
        return [row(text, name=name) for name, text in texts.items()]

    drafts = propose(drafter, *rows())
    finish(drafter)
    for (name, text), draft in zip(texts.items(), drafts, strict=True):
        text += draft.token_ids
        text.append(1 if name == "d" else next_token(text, GREEDY))
    monkeypatch.setattr(drafter._pace, "slowdown", lambda num_steps: 1 + num_steps)
    moves, move = [], drafter.cache.kv.move
    monkeypatch.setattr(drafter.cache.kv, "move", lambda *slots: (moves.append(slots), move(*slots)))
    model.passes.clear()
    lengths = [len(draft.token_ids) for draft in propose(drafter, *rows())]
    assert lengths == [0 if name == "d" else K for name in texts]
    assert (model.passes, moves) == ([], [])
    finish(drafter)
    assert model.passes
    assert moves, "the cache is brought up to date afterwards"
    monkeypatch.setattr(drafter._pace, "slowdown", lambda num_steps: 1.0)
    for text in texts.values():
        text.append(7)
    assert propose(drafter, *rows()) == propose(ModelDrafter(DraftModel(MODEL), config()), *rows())


@pytest.mark.parametrize(
    ("num_missing", "is_busy", "is_narrower"),
    [(1, False, True), (0, True, True), (0, False, False), (-1, True, False)],  # the last one with another group's pass
)
def test_branches_are_fewer_after_a_round_that_waited_for_one_step_or_its_end(num_missing, is_busy, is_narrower):
    now, model = [100.0], Counting(MODEL)
    model.is_busy = False
    drafter, text = RunAheadDrafter(DraftModel(model), config(), clock=lambda: now[0]), [5, 9, 4]
    propose(drafter, row(text, 0))
    for _ in range(2 + K - num_missing):  # the first call settles the answer, the second predicts the verdicts
        drafter.advance()
    width, model.is_busy = drafter._pace.width, is_busy
    now[0] += 0.01
    propose(drafter, row([*text, next_token(text, GREEDY)]))
    assert (drafter._pace.width < width) == is_narrower
