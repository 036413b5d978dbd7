"""Several drafters, one pass: what each drafts is what it would alone, in a part of the passes."""

import random

import pytest

from engine.drafting.model.draft_cache import DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.drafting.run_ahead.shared_pass import advance_together
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import GREEDY, PARAMS, Counting, propose, row
from tests.engine.drafting.run_ahead.test_run_ahead import MODEL, K, check_chain, committed, config


def make(count):
    model = Counting(MODEL)
    draft = DraftModel(model, cache=DraftCache(model, config()))
    return model, [RunAheadDrafter(draft, config()) for _ in range(count)]


def settle(drafters):
    for drafter in drafters:
        drafter.end_pass()
        drafter.settle()


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("max_rows", [100, 3])
def test_drafts_are_those_of_a_drafter_alone(params, max_rows):
    """Three groups at different places of their work, some far ahead, with verdicts of every kind."""
    chance, (_, drafters) = random.Random(2), make(3)
    texts = [[chance.randrange(2, VOCAB) for _ in range(length)] for length in (3, 30, 11)]
    for _ in range(40):
        for number in chance.sample(range(3), chance.randrange(1, 4)):
            text, group_params = texts[number], params if number else GREEDY
            settle(drafters)
            (draft,) = propose(drafters[number], row(text, K, name=str(number), params=group_params))
            check_chain(draft, text, group_params)
            length, is_foreseen = len(draft.token_ids), chance.random() < 0.7
            text += (
                committed(text, draft, group_params)
                if is_foreseen
                else [*draft.token_ids[: chance.randrange(length + 1)], chance.randrange(2, VOCAB)]
            )
        for _ in range(chance.choice([0, 1, 3, 20])):
            settle(drafters)
            advance_together(chance.sample(drafters, 3), max_rows)
    assert all(drafter.stats.hits > 5 for drafter in drafters)


def test_groups_share_their_passes_of_no_more_rows_than_they_may():
    model, drafters = make(4)
    for number, drafter in enumerate(drafters):
        propose(drafter, row([5, 9, 4 + number], K, name=str(number)))
    settle(drafters)
    model.passes.clear()
    advance_together(drafters, 3)
    assert [drafter.stats.num_forwards for drafter in drafters] == [1, 1, 1, 0]
    settle(drafters)
    advance_together(drafters[3:], 3)
    for _ in range(K):  # a token of each branch
        advance_together(drafters, 100)
    assert len(model.passes) == 2 + K
    assert [drafter.stats.num_forwards for drafter in drafters] == [1 + K] * 4
