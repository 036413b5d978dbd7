"""The rates of places, learned from outcomes."""

import random

import pytest

from engine.control.acceptance import PRIOR, Acceptance


def test_each_place_is_learned_apart():
    chance, acceptance = random.Random(1), Acceptance([PRIOR] * 4)
    for _ in range(3000):
        for place, rate in enumerate((0.9, 0.5, 0.1)):
            acceptance.observe(place, accepted=chance.random() < rate)
    assert [acceptance.rate(place) for place in range(4)] == pytest.approx([0.9, 0.5, 0.1, PRIOR], abs=0.08)


def test_the_first_outcomes_weigh_most_and_old_ones_are_forgotten():
    acceptance, rates = Acceptance([0.5]), []
    for _ in range(400):
        acceptance.observe(0, accepted=True)
        rates.append(acceptance.rate(0))
    assert rates[0] - 0.5 > 2 * (rates[20] - rates[19])
    for _ in range(400):
        acceptance.observe(0, accepted=False)
    assert acceptance.rate(0) < 0.25
