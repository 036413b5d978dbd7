"""Which tokens rank highest, and how far the draft's scores are trusted."""

import math
import random

import pytest
import torch

from engine.drafting.model.next_tokens import Confidence, NextTokens, Ranking, joined
from engine.params import SamplingParams
from engine.protocols import Request


@pytest.mark.parametrize("sharpness", [0.5, 6.0])
def test_how_far_scores_are_to_be_trusted_is_learned(sharpness):
    chance, confidence = random.Random(4), Confidence()
    request = Request("a", [1], 1, SamplingParams())
    tail = []
    for step in range(6000):
        scores = sorted((chance.gauss(0, 1) for _ in range(6)), reverse=True)
        [committed] = chance.choices(range(6), [math.exp(sharpness * score) for score in scores])
        confidence.learn(request, NextTokens(list(range(6)), scores), committed)
        if step > 3000:
            near = confidence.weights(request, [0.0, -0.2])
            tail.append(math.log(near[0] / near[1]) / 0.2)
    assert sum(tail) / len(tail) == pytest.approx(sharpness, rel=0.25)


def test_the_top_of_a_ranking_names_its_own_tokens():
    scores = torch.tensor([[1.0, 3.0, 2.0], [6.0, 4.0, 5.0]])
    best, ids = Ranking(scores).top(2)
    assert (best.tolist(), ids.tolist()) == ([[3, 2], [6, 5]], [[1, 2], [0, 2]])
    best, ids = Ranking(scores, torch.tensor([[7, 8, 9], [4, 5, 6]])).top(2)
    assert (best.tolist(), ids.tolist()) == ([[3, 2], [6, 5]], [[8, 9], [4, 6]])


def test_a_ranking_of_few_tokens_has_no_more_than_those():
    assert Ranking(torch.tensor([[1.0, 2.0]])).top(5)[1].tolist() == [[1, 0]]


def test_joined_rankings_keep_the_order_of_their_rows():
    whole = Ranking(torch.tensor([[1.0, 3.0], [6.0, 4.0]]), torch.tensor([[7, 8], [4, 5]]))
    one = Ranking(torch.tensor([[7.0, 9.0]]), torch.tensor([[1, 2]]))
    together = joined([(whole, 1), (one, 0), (whole, 0)])
    assert together.scores.tolist() == [[6, 4], [7, 9], [1, 3]]
    assert together.top(1)[1].tolist() == [[4], [2], [8]]
    assert joined([(Ranking(torch.ones(1, 3)), 0)]).token_ids is None
