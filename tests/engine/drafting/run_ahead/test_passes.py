"""Passes between two proposals: one at a time, measured, and only while there is something to do."""

import pytest

from engine.drafting.run_ahead.passes import PassesAhead


class Device:
    is_busy = False


class Passes(PassesAhead):
    """Launches so many passes; an answer of it is to be settled first."""

    def __init__(self, num_passes):
        self.now, self.backend, self.launched, self.unsettled = 1.0, Device(), 0, False
        super().__init__(lambda: self.now)
        self._work = self._launch(num_passes)

    def _launch(self, num_passes):
        for _ in range(num_passes):
            self.launched += 1
            yield

    @property
    def _is_settled(self):
        return not self.unsettled

    def _settle(self):
        self.unsettled = False


def test_each_call_launches_one_pass_until_none_is_left():
    passes = Passes(2)
    assert [(passes.advance(), passes.launched) for _ in range(3)] == [(True, 1), (True, 2), (False, 2)]
    assert not passes.advance()
    assert passes.stats.num_forwards == 2


def test_nothing_happens_while_a_pass_is_under_way():
    passes = Passes(2)
    passes.unsettled = passes.backend.is_busy = True
    assert passes.is_computing
    assert passes.advance()
    assert (passes.launched, passes.unsettled) == (0, True)


def test_the_last_answer_is_settled_before_any_pass_and_although_there_is_no_time():
    passes = Passes(1)
    passes.unsettled = True
    passes._pace.observe_answer()
    passes._pace.observe_request(passes.now, is_late=False)
    assert passes.has_time
    assert passes.advance()
    assert (passes.launched, passes.unsettled) == (0, False)
    assert not passes.has_time
    passes.unsettled = True
    passes.now += 0.5
    assert passes._begin_proposal() == passes.now
    assert not passes.unsettled


def test_a_pass_lasts_from_its_launch_until_it_is_seen_to_be_over():
    passes = Passes(2)
    passes.advance()
    passes.backend.is_busy = True
    passes.now += 0.004
    passes.advance()
    passes.now += 0.006
    passes.backend.is_busy = False
    passes.advance()
    assert passes._pace._pass_s == pytest.approx(0.01)


def test_a_pass_that_a_proposal_interrupts_is_not_measured():
    passes = Passes(2)
    passes.advance()
    passes.now += 0.5
    passes._begin_proposal()
    passes.advance()
    assert passes._pace._pass_s == 0


def test_drafts_and_passes_are_counted():
    passes = Passes(5)
    for reason in (None, "token", "token", None, "stale"):
        passes._count(reason)
    for is_used in (False, True, False):
        passes.advance()
        passes._count_passes(is_used=is_used)
    stats = passes.stats
    assert (stats.hits, stats.misses) == (2, {"token": 2, "stale": 1})
    assert (stats.num_forwards, stats.num_wasted) == (3, 2)
