"""Several drafters, one pass: what each drafts is what it would alone, in a part of the passes."""

import random
from dataclasses import replace

import pytest

from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_cache import DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.drafting.run_ahead.shared_pass import advance_together
from engine.params import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import GREEDY, Counting, propose, row
from tests.engine.drafting.run_ahead.test_chains import MODEL, K, config, next_token

SAMPLED = SamplingParams(temperature=0.8, seed=3)
SHAPED = replace(SAMPLED, presence_penalty=0.5)


def make(count, settings):
    model = Counting(MODEL)
    draft = DraftModel(model, cache=DraftCache(model, settings))
    return model, [RunAheadDrafter(draft, settings) for _ in range(count)]


def settle(drafters):
    for drafter in drafters:
        drafter.end_pass()
        drafter.settle()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SHAPED], ids=["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("max_rows", [100, 3])
def test_drafts_are_those_of_a_drafter_alone(params, max_rows):
    """Three groups at different places of their work, some far ahead, with verdicts of every kind."""
    chance, settings = random.Random(2), config()
    _, drafters = make(3, settings)
    texts = [[chance.randrange(2, VOCAB) for _ in range(length)] for length in (3, 30, 11)]
    greedy = [GREEDY, params, params]
    for _ in range(40):
        for number in chance.sample(range(3), chance.randrange(1, 4)):
            text, own = texts[number], greedy[number]
            settle(drafters)
            (draft,) = propose(drafters[number], row(text, K, name=str(number), params=own))
            (fresh,) = propose(ModelDrafter(DraftModel(MODEL), config()), row(text, K, params=own))
            assert draft.token_ids == fresh.token_ids[: len(draft.token_ids)]
            is_foreseen, length = chance.random() < 0.7, len(draft.token_ids)
            text += draft.token_ids[: length if is_foreseen else chance.randrange(length + 1)]
            text.append(next_token(text, own) if is_foreseen else chance.randrange(2, VOCAB))
        for _ in range(chance.choice([0, 1, 3, 20])):
            settle(drafters)
            advance_together(chance.sample(drafters, 3), max_rows)
    assert all(drafter.stats.hits > 5 for drafter in drafters)


def test_groups_that_run_ahead_at_one_time_share_their_passes():
    model, drafters = make(4, config())
    for number, drafter in enumerate(drafters):
        propose(drafter, row([5, 9, 4 + number], K, name=str(number)))
    settle(drafters)
    model.passes.clear()
    for _ in range(1 + K):  # the verdicts, and a token of each branch
        advance_together(drafters, 100)
    assert len(model.passes) == 1 + K
    assert [drafter.stats.num_forwards for drafter in drafters] == [1 + K] * 4


def test_a_pass_has_no_more_rows_than_it_may():
    _, drafters = make(4, config())
    for number, drafter in enumerate(drafters):
        propose(drafter, row([5, 9, 4 + number], K, name=str(number)))
    settle(drafters)
    advance_together(drafters, 3)
    assert [drafter.stats.num_forwards for drafter in drafters] == [1, 1, 1, 0]
    settle(drafters)
    advance_together(drafters[::-1], 3)
    assert drafters[3].stats.num_forwards == 1
