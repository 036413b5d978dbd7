"""Which tokens rank highest, and how far the draft's scores are trusted."""

import math
import random

import pytest

from engine.drafting.model.next_tokens import Confidence, NextTokens
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
