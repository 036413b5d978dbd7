"""The simulation against what can be worked out by hand."""

import pytest

from tests.bench.simulation import Costs, Plane, simulate

COSTS = Costs(
    target=Plane(20.0),
    draft=Plane(2.0),
    network_ms=0.5,
    overhead_ms=1.0,
    acceptance=0.8,
    rank_exponent=1.0,
)
OPTIONS = {"num_streams": 1, "speculation": "fixed", "num_tokens": 800}


def test_plain_rounds_cost_a_pass_the_network_and_the_rest():
    found = simulate(COSTS, "apart", num_speculative_tokens=0, **OPTIONS)
    assert found.tokens_per_s == pytest.approx(1e3 / (20 + 2 * 0.5 + 1), rel=0.01)


def test_a_draft_that_takes_turns_gains_what_leviathan_says():
    found = simulate(COSTS, "apart", num_speculative_tokens=4, **OPTIONS)
    length = sum(0.8**i for i in range(5))
    assert found.mean_acceptance_length == pytest.approx(length, rel=0.05)
    assert found.tokens_per_s == pytest.approx(1e3 * found.mean_acceptance_length / (20 + 1 + 1 + 4 * 2 + 1), rel=0.02)


def test_running_ahead_hides_the_draft_where_the_verdict_was_foreseen():
    found = simulate(COSTS, "ahead", num_speculative_tokens=4, **OPTIONS)
    assert found.hit_rate is not None
    assert 0.65 < found.hit_rate < 0.9
    hit_ms, miss_ms = 20 + 1 + 1 + 1, 20 + 1 + 1 + 1 + 4 * 2
    round_ms = found.hit_rate * hit_ms + (1 - found.hit_rate) * miss_ms
    assert found.tokens_per_s == pytest.approx(1e3 * found.mean_acceptance_length / round_ms, rel=0.03)


def test_the_control_finds_the_best_length_in_virtual_time():
    rates = [simulate(COSTS, "apart", num_speculative_tokens=k, **OPTIONS).tokens_per_s for k in (0, 2, 4, 6)]
    options = {**OPTIONS, "speculation": "adaptive", "num_tokens": 2000}
    adaptive = simulate(COSTS, "apart", num_speculative_tokens=6, **options)
    assert adaptive.tokens_per_s > 0.95 * max(rates)
