"""Arrivals have the rate and the burstiness that were asked for."""

import itertools
import math
from statistics import fmean, pstdev

import pytest

from tests.load.arrivals import arrival_times

COUNT = 20_000


def gaps(**arguments: float) -> list[float]:
    times = [0.0, *arrival_times(5.0, num_requests=COUNT, seed=1, **arguments)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_are_gamma_distributed(burstiness: float) -> None:
    """The coefficient of variation of a gamma distribution is 1 over the root of its shape."""
    drawn = gaps(burstiness=burstiness)
    variation = 1 / math.sqrt(burstiness)
    assert fmean(drawn) == pytest.approx(0.2, rel=5 * variation / math.sqrt(COUNT))
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(variation, rel=0.06)


def test_a_poisson_process_has_independent_counts() -> None:
    """In windows of a second the mean count equals its variance."""
    times = arrival_times(5.0, duration_s=4000, seed=2)
    counts = [0] * 4000
    for time_s in times:
        counts[int(time_s)] += 1
    assert fmean(counts) == pytest.approx(5.0, abs=0.15)
    assert pstdev(counts) ** 2 == pytest.approx(5.0, rel=0.12)


def test_infinite_burstiness_is_regular() -> None:
    assert gaps(burstiness=float("inf")) == pytest.approx([0.2] * COUNT)


def test_a_seed_repeats_the_arrivals_and_a_duration_ends_them() -> None:
    times = arrival_times(5.0, duration_s=10, seed=3)
    assert times == arrival_times(5.0, duration_s=10, seed=3)
    assert times != arrival_times(5.0, duration_s=10, seed=4)
    assert times[-1] < 10
    assert arrival_times(5.0, num_requests=len(times), seed=3) == times
