"""How likely verdicts are, and what is learned of it from those that came."""

import itertools
import math
import random

import pytest

from engine.drafting.chain import Chain
from engine.drafting.run_ahead.branches import Trunk
from engine.drafting.run_ahead.foresight import Foresight
from engine.drafting.run_ahead.verdicts import AcceptedLengths, Confidence, Options, likeliest
from engine.protocols import Request
from engine.sampling.params import SamplingParams


def test_the_closer_the_runner_up_the_earlier_it_is_prepared_for():
    outlook = [Options([5, 6, 7], [9.0, 5.0, 4.9]), Options([8, 9], [3.0, 2.9]), Options([1, 2], [7.0, 6.0])]
    # The draft is 5, 8. Its second token is all but a coin's throw, the first is as good as certain.
    assert likeliest(outlook, [5, 8], Confidence(), None) == [(2, 1), (1, 9), (2, 2), (0, 6), (0, 7)]


def test_verdicts_are_ranked_as_often_as_they_come():
    """By counting verdicts that are drawn as the confidence says."""
    chance, confidence = random.Random(3), Confidence()
    outlook = [Options(list(range(4)), sorted((chance.random() for _ in range(4)), reverse=True)) for _ in range(4)]
    counts: dict[tuple[int, int], int] = {}
    for _ in range(40_000):
        for accepted, options in enumerate(outlook):
            [token] = chance.choices(options.token_ids, confidence.weights(options.scores))
            if accepted == 3 or token != 0:
                counts[accepted, token] = counts.get((accepted, token), 0) + 1
                break
    order = likeliest(outlook, [0, 0, 0], confidence, None)
    assert len(order) == 3 * 3 + 4
    seen = [counts.get(verdict, 0) for verdict in order]
    assert all(later < earlier + 4 * math.sqrt(earlier) for earlier, later in itertools.pairwise(seen))


def test_known_lengths_take_the_place_of_the_scores():
    outlook = [Options([5, 6], [9.0, 1.0]), Options([7, 8], [3.0, 2.9])]
    assert likeliest(outlook, [5], Confidence(), [0.9, 0.1]) == [(0, 6), (1, 7), (1, 8)]
    assert likeliest(outlook, [5], Confidence(), [0.01, 0.99]) == [(1, 7), (1, 8), (0, 6)]


def test_a_position_where_nothing_may_follow_ends_the_outlook():
    assert likeliest([Options([], []), Options([7, 8], [3.0, 2.9])], [5], Confidence(), None) == []


@pytest.mark.parametrize("sharpness", [0.5, 6.0])
def test_how_far_scores_are_to_be_trusted_is_learned(sharpness):
    chance, confidence = random.Random(4), Confidence()
    tail = []
    for step in range(6000):
        scores = sorted((chance.gauss(0, 1) for _ in range(6)), reverse=True)
        [committed] = chance.choices(range(6), [math.exp(sharpness * score) for score in scores])
        confidence.observe(scores, committed)
        if step > 3000:
            near = confidence.weights([0.0, -0.2])
            tail.append(math.log(near[0] / near[1]) / 0.2)
    assert sum(tail) / len(tail) == pytest.approx(sharpness, rel=0.25)


@pytest.mark.parametrize("shares_noise", [True, False])
def test_a_verdict_teaches_what_its_rule_lets_the_scores_say(shares_noise):
    """Without shared noise, that drafted tokens were kept says nothing about the scores above them."""
    foresight = Foresight(2, shares_noise=shares_noise)
    trunk = Trunk(Request("a", [1], 1, SamplingParams(temperature=0)), Chain([5, 7]))
    trunk.outlook = [Options([5, 6], [2.0, 1.0]), Options([7, 8], [2.0, 1.0]), Options([9, 4], [1.0, 1.0])]
    before = Confidence().weights([2.0, 1.0])
    for _ in range(50):
        foresight.learn(trunk, 2, 9)
    after = foresight._confidence[True].weights([2.0, 1.0])
    assert (after[1] < before[1] - 0.001) == shares_noise
    assert foresight._confidence[False].weights([2.0, 1.0]) == before


def test_acceptance_is_learned():
    lengths = AcceptedLengths(3)
    for _ in range(2000):
        lengths.observe(1, 3)
        lengths.observe(3, 3)
        lengths.observe(2, 2)  # cut short: the third token is as likely as in other drafts
    assert lengths.probabilities(3) == pytest.approx([0, 1 / 3, 0, 2 / 3], abs=0.01)
    assert lengths.probabilities(1) == pytest.approx([0, 1], abs=0.01)
    assert lengths.expected(3) == pytest.approx(7 / 3, abs=0.02)


@pytest.mark.parametrize("length", [1, 2])
def test_short_drafts_do_not_make_acceptance_look_worse(length):
    """What follows a short draft that was accepted whole is unknown, not rejected."""
    lengths = AcceptedLengths(4)
    chance = random.Random(1)
    for _ in range(3000):
        lengths.observe(next((a for a in range(length) if chance.random() > 0.8), length), length)
    assert lengths.probabilities(length) == pytest.approx(
        [0.8**a * 0.2 for a in range(length)] + [0.8**length], abs=0.1
    )
