"""Pace, by a clock that tests move: what fits before the next request, and what late steps cost."""

import pytest

from engine.drafting.run_ahead.pace import WIDTHS, Pace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pace(clock):
    return Pace(clock)


def one_round(pace, clock, *, length, finished=None, is_late=False):
    """An answer, the end of what was prepared if there was one, and the next request after `length` seconds."""
    pace.observe_answer()
    started = clock.now
    if finished is not None:
        clock.now = started + finished
        pace.observe_finish()
    clock.now = started + length
    pace.observe_request(clock.now, is_late=is_late)


def test_branches_that_are_complete_early_are_followed_by_more(pace, clock):
    before = pace.width
    one_round(pace, clock, length=0.1, finished=0.07)
    assert pace.width == before + 1
    for _ in WIDTHS:
        one_round(pace, clock, length=0.1, finished=0.07)
    assert pace.width == len(WIDTHS) - 1


def test_branches_that_are_complete_only_just_in_time_stay_as_many(pace, clock):
    before = pace.width
    one_round(pace, clock, length=0.1, finished=0.09)
    assert pace.width == before


def test_an_earlier_finish_is_none_of_this_round(pace, clock):
    one_round(pace, clock, length=0.1, finished=0.07)
    before = pace.width
    one_round(pace, clock, length=0.1)
    assert pace.width == before


@pytest.mark.parametrize("is_late", [False, True])
def test_branches_that_are_late_are_followed_by_fewer(pace, clock, is_late):
    before = pace.width
    one_round(pace, clock, length=0.1, is_late=is_late)
    assert pace.width == before - is_late
    for _ in WIDTHS:
        one_round(pace, clock, length=0.1, is_late=is_late)
    assert pace.width == (0 if is_late else before)


def test_a_round_ends_when_its_request_comes(pace, clock):
    """And not when the drafter looks at it."""
    pace.observe_answer()
    clock.now += 0.5
    pace.observe_request(clock.now - 0.4, is_late=False)
    pace.observe_late_steps(0.01, 1)
    assert pace.slowdown(1) == pytest.approx(1.1)


def test_idle_time_is_no_round(pace, clock):
    before = pace.width
    one_round(pace, clock, length=5.0, finished=0.01, is_late=True)
    assert pace.width == before
    assert pace.has_time


def test_a_request_before_any_answer_measures_nothing(pace, clock):
    pace.observe_request(clock.now, is_late=True)
    pace.observe_late_steps(0.02, 2)
    assert pace.slowdown(2) == 1


def test_there_is_time_while_half_a_pass_is_likely_to_fit(pace, clock):
    assert pace.has_time
    one_round(pace, clock, length=0.1)
    pace.observe_pass(0.04)
    pace.observe_answer()
    clock.now += 0.079
    assert pace.has_time
    clock.now += 0.002
    assert not pace.has_time


def test_the_slowdown_is_the_late_steps_share_of_a_round(pace, clock):
    assert pace.slowdown(3) == 1
    one_round(pace, clock, length=0.1)
    assert pace.slowdown(3) == 1
    pace.observe_late_steps(0.03, 3)
    assert pace.slowdown(1) == pytest.approx(1.1)
    assert pace.slowdown(4) == pytest.approx(1.4)


def test_recent_rounds_weigh_more(pace, clock):
    one_round(pace, clock, length=0.1)
    pace.observe_late_steps(0.01, 1)
    for _ in range(60):
        one_round(pace, clock, length=0.2)
    assert pace.slowdown(1) == pytest.approx(1.05, abs=0.001)
