"""What the planner expects of first draft tokens is what is accepted, on average, whatever it expects."""

import random
from collections import defaultdict

from engine.control.survival import Survival
from engine.params import SamplingParams
from engine.protocols import Request, chain

K = 4


def test_expectations_are_calibrated_within_five_points_on_average():
    """Requests that are easy and hard, and other ones after a while."""
    survival, chance = Survival(K), random.Random(1)
    bins = defaultdict(list)
    for nth in range(800):
        for i, rate in enumerate((0.3, 0.6, 0.9)):
            history = survival.history(Request(f"{i}-{nth // 100}", [1, 2], 2, SamplingParams()))
            accepted = next((place for place in range(K) if chance.random() > rate), K)
            expected = float(survival.chances([history], 1)[0, 0])
            bins[int(10 * expected)].append(expected - (accepted > 0))
            survival.observe(history, chain([7] * K), list(range(accepted)))
    assert sum(len(errors) > 50 for errors in bins.values()) >= 6
    assert sum(abs(sum(errors)) for errors in bins.values()) / 2400 < 0.05
