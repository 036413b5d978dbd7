"""Measured passes and rounds: how much is prepared, when there is time for a pass, and what lateness costs."""

import pytest
from hypothesis import given, strategies

from engine.drafting.run_ahead import passes as passes_module
from engine.drafting.run_ahead.passes import WIDTHS, Pace, PassesAhead
from engine.protocols import run_in_process
from engine.stats.preparation import Preparation
from tests.fakes import Clock, run_ahead


class Device:
    is_busy = False


class Passes(PassesAhead):
    """Launches so many passes, each of which may compile something."""

    def __init__(self, *compiled):
        self.device, self.now = Device(), Clock(1.0)
        super().__init__(self.device, self.now)
        self._work = (name and passes_module.PREPARATION.observe(name) for name in compiled)

    def _propose(self, rows, arrived):
        return []

    def release(self, request_id):
        pass

    def stop(self):
        self._work = None


def test_a_pass_lasts_from_its_launch_until_it_is_seen_to_be_over():
    passes = Passes(None, None)
    run_ahead(passes)
    passes.device.is_busy = True
    passes.now.now += 0.004
    run_ahead(passes)
    passes.now.now += 0.006
    passes.device.is_busy = False
    run_ahead(passes)
    assert (passes.stats.num_forwards, passes._pace._pass_s) == (2, pytest.approx(0.01))


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_pass_that_a_proposal_interrupts_or_that_compiles_is_not_measured(is_interrupted, monkeypatch):
    monkeypatch.setattr(passes_module, "PREPARATION", preparation := Preparation())
    with preparation.expected():
        pass
    passes = Passes(None if is_interrupted else "compiled", None)
    for seconds in (0.5, 0.002):
        run_ahead(passes)
        passes.now.now += seconds
        if is_interrupted and seconds == 0.5:
            run_in_process(passes.propose([]))
    run_ahead(passes)
    assert passes._pace._pass_s == pytest.approx(0.002)


def test_there_is_time_only_for_a_pass_that_is_likely_to_fit():
    passes = Passes(None)
    assert passes.has_time
    passes._pace.observe_answer()
    passes._pace.observe_request(passes.now.now, is_late=False)
    assert not passes.has_time


@pytest.fixture
def clock():
    return Clock(100.0)


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


@pytest.mark.parametrize(
    ("finished", "is_late", "change"), [(0.07, False, 1), (0.09, False, 0), (None, False, 0), (None, True, -1)]
)
def test_what_was_complete_early_is_followed_by_more_and_what_was_late_by_less(pace, clock, finished, is_late, change):
    before = pace.width
    one_round(pace, clock, length=0.1, finished=finished, is_late=is_late)
    assert pace.width == before + change
    for _ in WIDTHS:
        one_round(pace, clock, length=0.1, finished=finished, is_late=is_late)
    assert pace.width == {1: len(WIDTHS) - 1, 0: before, -1: 0}[change]
    one_round(pace, clock, length=0.1)
    assert pace.width == {1: len(WIDTHS) - 1, 0: before, -1: 0}[change], "an earlier finish is none of this round"


def test_idle_time_and_a_request_before_any_answer_are_no_rounds(pace, clock):
    before = pace.width
    pace.observe_request(clock.now, is_late=True)
    one_round(pace, clock, length=5.0, finished=0.01, is_late=True)
    pace.observe_late_steps(0.02, 2)
    assert (pace.width, pace.has_time, pace.slowdown(2)) == (before, True, 1)


def test_there_is_time_while_half_a_pass_is_likely_to_fit(pace, clock):
    assert pace.has_time
    one_round(pace, clock, length=0.1)
    pace.observe_pass(0.04)
    pace.observe_answer()
    clock.now += 0.079
    assert pace.has_time
    clock.now += 0.002
    assert not pace.has_time


def test_the_slowdown_is_the_late_steps_share_of_a_round_that_ends_when_its_request_comes(pace, clock):
    pace.observe_answer()
    clock.now += 0.5
    pace.observe_request(clock.now - 0.4, is_late=False)
    assert pace.slowdown(3) == 1
    pace.observe_late_steps(0.03, 3)
    assert pace.slowdown(1) == pytest.approx(1.1)
    assert pace.slowdown(4) == pytest.approx(1.4)


def steady_round(pace, clock):
    """A round of the target that takes 8 ms, with a pass of 2 ms whenever there is time; return their number."""
    pace.observe_answer()
    end = clock.now + 0.008
    num_passes = 0
    while clock.now < end and pace.has_time:
        clock.now += 0.002
        pace.observe_pass(0.002)
        num_passes += 1
    clock.now = max(clock.now, end)
    pace.observe_request(end, is_late=False)
    return num_passes


seconds = strategies.floats(0, 1e4, allow_subnormal=False)


@given(strategies.lists(strategies.tuples(strategies.sampled_from(["pass", "answer", "request"]), seconds)))
def test_no_history_stops_the_passes_for_good(history):
    """One slow pass must not: no pass is launched without time for it, and none is measured that is not launched."""
    clock = Clock(100.0)
    pace = Pace(clock)
    for event, length in [*history, ("pass", 0.4)]:
        if event == "pass":
            pace.observe_pass(length)
            continue
        clock.now += length
        pace.observe_answer() if event == "answer" else pace.observe_request(clock.now, is_late=False)
    num_passes = [steady_round(pace, clock) for _ in range(200)]
    assert num_passes[-20:] == [4] * 20
