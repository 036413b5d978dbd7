"""Branches: how likely verdicts are, and where each leads; what branches draft is tested in `test_run_ahead`."""

import itertools
import math
import random

import pytest
import torch

from engine.control.acceptance import Acceptance
from engine.drafting.model.draft_cache import CachedPrefix
from engine.drafting.model.next_tokens import Confidence, NextTokens, Ranking
from engine.drafting.model.token_drawer import Chain
from engine.drafting.run_ahead.branches import DraftContext, VerdictPredictor
from engine.params import SamplingParams
from engine.protocols import Request

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
