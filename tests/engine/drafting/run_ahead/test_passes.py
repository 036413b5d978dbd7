"""Passes between two proposals: one at a time, measured, and only while there is something to do."""

import pytest
from hypothesis import given, strategies

from engine.drafting.run_ahead import passes as passes_module
from engine.drafting.run_ahead.passes import WIDTHS, Pace, PassesAhead
from engine.params import SamplingParams
from engine.protocols import run_in_process
from engine.stats.preparation import Preparation
from tests.engine.drafting.proposing import context_model


class Device:
    is_busy = False


class Passes(PassesAhead):
    """Launches so many passes; an answer of it is to be settled first."""

    def __init__(self, num_passes):
        self.now, self.device, self.launched, self.num_settled = 1.0, Device(), 0, 0
        super().__init__(self.device, lambda: self.now)
        self._work = self._launch(num_passes)

    def _launch(self, num_passes):
        for _ in range(num_passes):
            self.launched += 1
            yield

    def settle_later(self):
        self._unsettled = self.settled

    def settled(self):
        self.num_settled += 1

    def _propose(self, rows, arrived):
        return arrived

    def release(self, request_id):
        pass

    def stop(self):
        self._work = None


MODEL = context_model(1)
PARAMS = SamplingParams(temperature=0.8, seed=3)


def test_each_call_launches_one_pass_until_none_is_left():
    passes = Passes(2)
    assert [(passes.advance(), passes.launched) for _ in range(3)] == [(True, 1), (True, 2), (False, 2)]
    assert not passes.advance()
    assert passes.stats.num_forwards == 2


def test_nothing_happens_while_a_pass_is_under_way():
    passes = Passes(2)
    passes.settle_later()
    passes.device.is_busy = True
    assert passes.is_computing
    assert passes.advance()
    assert (passes.launched, passes.num_settled) == (0, 0)


def test_the_last_answer_is_settled_before_any_pass_and_although_there_is_no_time():
    passes = Passes(1)
    passes.settle_later()
    passes._pace.observe_answer()
    passes._pace.observe_request(passes.now, is_late=False)
    assert passes.has_time
    assert passes.advance()
    assert (passes.launched, passes.num_settled) == (0, 1)
    assert not passes.has_time
    passes.settle_later()
    passes.now += 0.5
    assert run_in_process(passes.propose([])) == passes.now
    assert passes.num_settled == 2


def test_a_pass_lasts_from_its_launch_until_it_is_seen_to_be_over():
    passes = Passes(2)
    passes.advance()
    passes.device.is_busy = True
    passes.now += 0.004
    passes.advance()
    passes.now += 0.006
    passes.device.is_busy = False
    passes.advance()
    assert passes._pace._pass_s == pytest.approx(0.01)


def test_a_pass_that_a_proposal_interrupts_is_not_measured():
    passes = Passes(2)
    passes.advance()
    passes.now += 0.5
    run_in_process(passes.propose([]))
    passes.advance()
    assert passes._pace._pass_s == 0


@pytest.mark.parametrize("kind", [None, "compiled"])
def test_a_pass_that_compiles_or_records_is_not_measured(kind, monkeypatch):
    monkeypatch.setattr(passes_module, "PREPARATION", preparation := Preparation())
    with preparation.expected():
        pass
    passes = Passes(2)
    for first in (kind, None):
        passes._work = map(preparation.observe, [first]) if first else passes._launch(1)
        passes.advance()
        passes.now += 0.5 if first else 0.002
        passes.advance()
    assert passes._pace._pass_s == pytest.approx(0.002)


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


@pytest.mark.parametrize(("finished", "wider"), [(0.07, 1), (0.09, 0)], ids=["early", "just in time"])
def test_branches_that_are_complete_early_are_followed_by_more(pace, clock, finished, wider):
    before = pace.width
    one_round(pace, clock, length=0.1, finished=finished)
    assert pace.width == before + wider
    for _ in WIDTHS:
        one_round(pace, clock, length=0.1, finished=finished)
    assert pace.width == (len(WIDTHS) - 1 if wider else before)


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
    clock = Clock()
    pace = Pace(clock)
    for kind, length in [*history, ("pass", 0.4)]:
        if kind == "pass":
            pace.observe_pass(length)
            continue
        clock.now += length
        pace.observe_answer() if kind == "answer" else pace.observe_request(clock.now, is_late=False)
    num_passes = [steady_round(pace, clock) for _ in range(200)]
    assert num_passes[-20:] == [4] * 20


def test_a_pass_that_is_slow_for_good_is_tried_once_in_many_rounds(pace, clock):
    one_round(pace, clock, length=0.008)
    pace.observe_pass(0.4)
    tried = []
    for _ in range(204):
        pace.observe_answer()
        tried.append(pace.has_time)
        clock.now += 0.008
        pace.observe_request(clock.now, is_late=False)  # and the pass is never seen to end
    assert sum(tried) == 4


def test_a_pass_after_a_pause_is_measured_anew(pace, clock):
    pace.observe_pass(0.4)
    for _ in range(50):
        one_round(pace, clock, length=0.008)
    pace.observe_pass(0.002)
    pace.observe_pass(0.004)
    assert pace._pass_s == pytest.approx(0.0022)
