"""Foresight: from rankings to the verdicts that are drafted for."""

import pytest
import torch

from engine.drafting.chain import Chain, RankedRow, Ranking
from engine.drafting.run_ahead.branches import Trunk
from engine.drafting.run_ahead.foresight import NUM_CANDIDATES, Foresight
from engine.drafting.run_ahead.verdicts import Options
from engine.protocols import Request
from engine.sampling.params import SamplingParams

NO = float("-inf")


def trunk(drafted=(), rankings=(), **params):
    request = Request("a", [1, 2], 1, SamplingParams(**params))
    return Trunk(
        request, Chain(list(drafted), rankings=[RankedRow(Ranking(torch.tensor([row])), 0) for row in rankings])
    )


def test_every_trunk_gets_the_options_of_its_own_positions():
    """Two trunks of different lengths: the rankings of their draft tokens, then the tip's."""
    long, short = trunk([1, 0], [[1.0, 4.0, 2.0], [5.0, 3.0, 4.0]]), trunk()
    Foresight(2, shares_noise=True).look([long, short], Ranking(torch.tensor([[7.0, 8.0, 9.0], [3.0, 1.0, 2.0]])))
    assert long.outlook == [
        Options([1, 2, 0], [4, 2, 1]),
        Options([0, 2, 1], [5, 4, 3]),
        Options([2, 1, 0], [9, 8, 7]),
    ]
    assert short.outlook == [Options([0, 2, 1], [3, 2, 1])]
    assert long.chain.rankings == []  # their scores are large, and are not needed any more


def test_tokens_that_may_not_come_are_no_options():
    one_trunk = trunk()
    Foresight(2, shares_noise=True).look([one_trunk], Ranking(torch.tensor([[NO, 2.0, NO, 5.0]])))
    assert one_trunk.outlook == [Options([3, 1], [5, 2])]


def test_the_outlook_holds_a_few_tokens_of_a_large_vocabulary():
    one_trunk = trunk()
    Foresight(2, shares_noise=True).look([one_trunk], Ranking(torch.arange(100.0).unsqueeze(0)))
    assert one_trunk.outlook[0].token_ids == list(range(99, 99 - NUM_CANDIDATES, -1))


@pytest.mark.parametrize(("width", "expected"), [(1, [(0, 6)]), (2, [(0, 6), (0, 7)]), (9, [(0, 6), (0, 7)])])
def test_the_likeliest_verdicts_are_chosen_but_for_those_that_end_the_text(width, expected):
    one_trunk = trunk()
    one_trunk.outlook = [Options([5, 6, 7], [3.0, 2.0, 1.0])]
    Foresight(2, shares_noise=True).choose_roots(one_trunk, width, {5})
    assert one_trunk.roots == expected


def test_without_shared_noise_recent_lengths_decide_how_far_a_draft_gets():
    foresight = Foresight(1, shares_noise=False)
    one_trunk = trunk([5])
    one_trunk.outlook = [Options([5, 6], [9.0, 0.0]), Options([7], [0.0])]
    for _ in range(500):
        foresight.learn(one_trunk, 0, 6)
    foresight.choose_roots(one_trunk, 1, ())
    assert one_trunk.roots == [(0, 6)]
    for _ in range(500):
        foresight.learn(one_trunk, 1, 7)
    foresight.choose_roots(one_trunk, 1, ())
    assert one_trunk.roots == [(1, 7)]


def test_an_empty_draft_teaches_nothing_about_accepted_lengths():
    foresight = Foresight(2, shares_noise=True)
    before = foresight.accepted.probabilities(2)
    foresight.learn(trunk(), 0, 5)
    assert foresight.accepted.probabilities(2) == before
    foresight.learn(trunk([4, 5]), 0, 6)
    assert foresight.accepted.probabilities(2) != before
