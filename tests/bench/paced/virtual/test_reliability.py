"""What the planner expects of drafts is accepted, and how that is counted."""

import random

import pytest

from engine.control.survival import Prior
from engine.params import SamplingParams
from engine.protocols import Request, chain
from tests.bench.paced.virtual.reliability import Reliability, WatchedSurvival

K = 4


def test_expectations_are_calibrated_within_five_points_on_average() -> None:
    """Requests that are easy and hard, and other ones after a while."""
    survival, chance = WatchedSurvival(Prior.of(K)), random.Random(1)
    for nth in range(800):
        for i, rate in enumerate((0.3, 0.6, 0.9)):
            request = Request(f"{i}-{nth // 100}", [1, 2], 2, SamplingParams())
            accepted = next((i for i in range(K) if chance.random() > rate), K)
            survival.observe(survival.history(request, nth), chain([7] * K), list(range(accepted)))
    assert sum(count > 150 for count in survival.reliability.counts) >= 6
    assert survival.reliability.error < 0.05


def test_tokens_are_counted_in_bins() -> None:
    reliability = Reliability()
    for predicted, accepted in ((0.05, False), (0.95, True), (0.91, False), (1.0, True)):
        reliability.observe(predicted, accepted=accepted)
    assert (reliability.counts[0], reliability.counts[9]) == (1, 3)
    assert reliability.accepted[9] == 2
    assert reliability.predicted[9] == pytest.approx(2.86)
    assert reliability.error == pytest.approx((0.05 + 0.86) / 4)
