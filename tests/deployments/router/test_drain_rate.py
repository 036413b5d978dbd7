"""How fast requests finish, and when a refused client should come again."""

import pytest

from deployments.router.drain_rate import HALF_LIFE_S, LONGEST_RETRY_S, DrainRate, retry_after_s


def run(rate: DrainRate, per_s: float, duration_s: float, started: float = 0.0) -> float:
    """Observe rounds of 0.1 s in which so many requests finish; return the time after them."""
    due = 0.0
    rounds = round(duration_s * 10)
    for number in range(rounds + 1):
        due += per_s / 10 if number else 0
        rate.observe(int(due), started + number / 10, has_work=True)
        due -= int(due)
    return started + duration_s


def test_the_rate_is_what_finished_per_second_of_work() -> None:
    rate = DrainRate()
    run(rate, 5.0, 60.0)
    assert rate.per_s == pytest.approx(5.0, rel=0.05)


def test_the_last_seconds_count_most() -> None:
    rate = DrainRate()
    now = run(rate, 20.0, 60.0)
    run(rate, 2.0, HALF_LIFE_S, now)
    assert rate.per_s == pytest.approx((20 + 2) / 2, rel=0.05)


def test_time_without_work_does_not_count() -> None:
    rate = DrainRate()
    now = run(rate, 5.0, 60.0)
    before = rate.per_s
    rate.observe(0, now, has_work=False)
    rate.observe(0, now + 3600, has_work=True)
    assert rate.per_s == before


def test_a_target_that_stands_still_lowers_the_rate() -> None:
    rate = DrainRate()
    now = run(rate, 5.0, 60.0)
    rate.observe(0, now + HALF_LIFE_S, has_work=True)
    assert rate.per_s < 3


@pytest.mark.parametrize(
    ("num_requests", "per_s", "seconds"),
    [(0, 5.0, 1), (1, 5.0, 1), (11, 5.0, 3), (288, 5.0, 58), (10_000, 5.0, LONGEST_RETRY_S), (1, 0.0, LONGEST_RETRY_S)],
)
def test_clients_come_again_when_the_queue_has_drained(num_requests: int, per_s: float, seconds: int) -> None:
    assert retry_after_s(num_requests, per_s) == seconds
