"""Branches: how likely verdicts are, and where each leads; what branches draft is tested in `test_chains`."""

import itertools
import math
import random

import pytest
import torch

from engine.control.acceptance import Acceptance
from engine.drafting.model.draft_cache import CachedPrefix
from engine.drafting.model.next_tokens import NUM_CANDIDATES, Confidence, NextTokens, Ranking
from engine.drafting.model.token_drawer import Chain, Drawn
from engine.drafting.run_ahead.branches import Branches, DraftContext, VerdictPredictor
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.layer_attention import KVShape
from engine.params import SamplingParams
from engine.protocols import Request


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ([1, 2, 7], (0, 7)),
        ([1, 2, 3, 7], (1, 7)),
        ([1, 2, 3, 4, 7], (2, 7)),
        ([1, 2, 3, 3], (1, 3)),
        ([1, 2, 4, 7], None),
        ([1, 2], None),
        ([1, 2, 3, 4, 7, 8], None),
    ],
    ids=["none accepted", "one", "all", "again", "another token", "no new token", "more than one round"],
)
def test_committed_tokens_tell_the_verdict(committed, expected):
    context = DraftContext(Request("a", [1, 2], 1, SamplingParams()), Chain([3, 4]), CachedPrefix())
    assert context.verdict(committed) == expected


NO = float("-inf")


def draft_context(drafted=(), rankings=(), next_tokens=(), **params):
    request = Request("a", [1, 2], 1, SamplingParams(**params))
    rows = [(Ranking(torch.tensor([row])), 0) for row in rankings]
    return DraftContext(request, Chain(list(drafted), rankings=rows), CachedPrefix(), list(next_tokens))


def likeliest(context, rates=None):
    """All verdicts on a draft, the likeliest first; without shared noise, if rates of acceptance are known."""
    predictor = VerdictPredictor(4, shares_noise=rates is None)
    predictor._acceptance = Acceptance(rates or [0.7])
    return predictor.predict(context, 100, ())


def test_the_closer_the_runner_up_the_earlier_it_is_prepared_for():
    next_tokens = [
        NextTokens([5, 6, 7], [9.0, 5.0, 4.9]),
        NextTokens([8, 9], [3.0, 2.9]),
        NextTokens([1, 2], [7.0, 6.0]),
    ]
    # The draft is 5, 8. Its second token is all but a coin's throw, the first is as good as certain.
    assert likeliest(draft_context([5, 8], (), next_tokens)) == [(2, 1), (1, 9), (2, 2), (0, 6), (0, 7)]


def test_verdicts_are_ranked_as_often_as_they_come():
    """By counting verdicts that are drawn as the confidence says."""
    chance = random.Random(3)
    next_tokens = [
        NextTokens(list(range(4)), sorted((chance.random() for _ in range(4)), reverse=True)) for _ in range(4)
    ]
    context = draft_context([0, 0, 0], (), next_tokens)
    counts: dict[tuple[int, int], int] = {}
    for _ in range(40_000):
        for accepted, options in enumerate(next_tokens):
            [token] = chance.choices(options.token_ids, Confidence().weights(context.request, options.scores))
            if accepted == 3 or token != 0:
                counts[accepted, token] = counts.get((accepted, token), 0) + 1
                break
    order = likeliest(context)
    assert len(order) == 3 * 3 + 4
    seen = [counts.get(verdict, 0) for verdict in order]
    assert all(later < earlier + 4 * math.sqrt(earlier) for earlier, later in itertools.pairwise(seen))


def test_known_acceptance_takes_the_place_of_the_scores():
    context = draft_context([5], (), [NextTokens([5, 6], [9.0, 1.0]), NextTokens([7, 8], [3.0, 2.9])])
    assert likeliest(context, [0.1]) == [(0, 6), (1, 7), (1, 8)]
    assert likeliest(context, [0.99]) == [(1, 7), (1, 8), (0, 6)]


def test_a_position_where_nothing_may_follow_ends_the_next_tokens():
    assert likeliest(draft_context([5], (), [NextTokens([], []), NextTokens([7, 8], [3.0, 2.9])])) == []


@pytest.mark.parametrize("shares_noise", [True, False])
def test_a_verdict_teaches_what_its_rule_lets_the_scores_say(shares_noise):
    """Without shared noise, that drafted tokens were kept says nothing about the scores above them."""
    predictor = VerdictPredictor(2, shares_noise=shares_noise)
    options = [NextTokens([5, 6], [2.0, 1.0]), NextTokens([7, 8], [2.0, 1.0]), NextTokens([9, 4], [1.0, 1.0])]
    context, sampled = draft_context([5, 7], (), options, temperature=0), draft_context().request
    before = Confidence().weights(sampled, [2.0, 1.0])
    for _ in range(50):
        predictor.learn(context, 2, 9)
    after = predictor._confidence.weights(context.request, [2.0, 1.0])
    assert (after[1] < before[1] - 0.001) == shares_noise
    assert predictor._confidence.weights(sampled, [2.0, 1.0]) == before


def test_every_context_gets_the_options_of_its_own_positions():
    """Two contexts of different lengths: the rankings of their draft tokens, then the tip's."""
    long, short = draft_context([1, 0], [[1.0, 4.0, 2.0], [5.0, 3.0, 4.0]]), draft_context()
    VerdictPredictor(2, shares_noise=True).rank(
        [long, short], Ranking(torch.tensor([[7.0, 8.0, 9.0], [3.0, 1.0, 2.0]]))
    )
    assert long.next_tokens == [
        NextTokens([1, 2, 0], [4, 2, 1]),
        NextTokens([0, 2, 1], [5, 4, 3]),
        NextTokens([2, 1, 0], [9, 8, 7]),
    ]
    assert short.next_tokens == [NextTokens([0, 2, 1], [3, 2, 1])]
    assert long.chain.rankings == []  # their scores are large, and are not needed any more


def test_tokens_that_may_not_come_are_no_options():
    context = draft_context()
    VerdictPredictor(2, shares_noise=True).rank([context], Ranking(torch.tensor([[NO, 2.0, NO, 5.0]])))
    assert context.next_tokens == [NextTokens([3, 1], [5, 2])]


def test_the_next_tokens_holds_a_few_tokens_of_a_large_vocabulary():
    context = draft_context()
    VerdictPredictor(2, shares_noise=True).rank([context], Ranking(torch.arange(100.0).unsqueeze(0)))
    assert context.next_tokens[0].token_ids == list(range(99, 99 - NUM_CANDIDATES, -1))


@pytest.mark.parametrize(("width", "expected"), [(1, [(0, 6)]), (9, [(0, 6), (0, 7)])])
def test_the_likeliest_verdicts_are_chosen_but_for_those_that_end_the_text(width, expected):
    context = draft_context()
    context.next_tokens = [NextTokens([5, 6, 7], [3.0, 2.0, 1.0])]
    assert VerdictPredictor(2, shares_noise=True).predict(context, width, {5}) == expected


def test_without_shared_noise_recent_lengths_decide_how_far_a_draft_gets():
    predictor = VerdictPredictor(1, shares_noise=False)
    context = draft_context([5])
    context.next_tokens = [NextTokens([5, 6], [9.0, 0.0]), NextTokens([7], [0.0])]
    for _ in range(500):
        predictor.learn(context, 0, 6)
    assert predictor.predict(context, 1, ()) == [(0, 6)]
    for _ in range(500):
        predictor.learn(context, 1, 7)
    assert predictor.predict(context, 1, ()) == [(1, 7)]


def test_an_empty_draft_teaches_nothing_about_accepted_lengths():
    predictor = VerdictPredictor(2, shares_noise=True)
    before = predictor.gains()
    predictor.learn(draft_context(), 0, 5)
    assert predictor.gains() == before
    predictor.learn(draft_context([4, 5]), 0, 6)
    assert predictor.gains() != before


def test_a_branch_has_its_tokens_in_the_order_in_which_they_will_be_committed():
    """The accepted draft tokens, the token after them, and what was drawn; a grammar reads them in this order."""
    contexts = [draft_context([5, 6]), draft_context()]
    contexts[0].verdicts, contexts[1].verdicts = [(2, 7), (0, 8)], [(0, 9)]
    branches = Branches(contexts, 2, KVTensors(KVShape(1, 1, 1, 1), 1, 1, torch.zeros(1)))
    for drawn in ([10, 11, 12, 13], [20, 21, 22, 23]):
        branches.add(Drawn(torch.tensor(drawn)))
    assert branches.paths() == [[[5, 6, 7, 10, 20], [8, 11, 21]], [[9, 12, 22], [9, 13, 23]]]
