"""Pace: how long a drafter's passes take, and how many of them fit before the next request."""

from collections.abc import Callable

WIDTHS = (4, 6, 8, 12, 16, 20, 24)
_SMOOTHING = 0.9
_LONGEST_ROUND_S = 1.0
_SLACK = 0.8


class Pace:
    """Measured times of the drafter's passes and of the target's rounds, and the number of branches that fit.

    Attributes:
        width: index into `WIDTHS` of the number of branches, or of nodes of a tree, that a pass computes per request.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.width = WIDTHS.index(8)
        self._step_s: float | None = None
        self._pass_s = 0.0
        self._gap_s: float | None = None
        self._answered = self._finished = 0.0

    def observe_request(self, arrived: float, *, is_late: bool) -> None:
        """Measure the time from the last answer to this request, and adapt the width to it.

        Args:
            arrived: when the request came.
            is_late: too little was prepared by then.
        """
        if not self._answered:
            return
        gap = arrived - self._answered
        if gap > _LONGEST_ROUND_S:
            return  # the drafter was idle
        self._gap_s = _smooth(self._gap_s, gap)
        if is_late:
            self.width = max(0, self.width - 1)
        elif self._answered < self._finished < self._answered + _SLACK * gap:
            self.width = min(len(WIDTHS) - 1, self.width + 1)

    def observe_answer(self) -> None:
        """Note that an answer is sent now."""
        self._answered = self._clock()

    def observe_finish(self) -> None:
        """Note that nothing more can be prepared."""
        self._finished = self._clock()

    @property
    def has_time(self) -> bool:
        """Whether at least half of a pass is likely to fit before the next request."""
        if self._gap_s is None:
            return True
        return self._clock() - self._answered + self._pass_s / 2 < self._gap_s

    def observe_pass(self, seconds: float) -> None:
        """Take the time of a pass that ran ahead of the next request."""
        self._pass_s = _smooth(self._pass_s or None, seconds)

    def observe_late_steps(self, seconds: float, num_steps: int) -> None:
        """Take the time of draft steps that the target waited for."""
        self._step_s = _smooth(self._step_s, seconds / num_steps)

    def slowdown(self, num_steps: int) -> float:
        """Return the relative round time with `num_steps` late draft steps; 1 until both times are measured."""
        if self._step_s is None or not self._gap_s:
            return 1.0
        return 1 + num_steps * self._step_s / self._gap_s


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else _SMOOTHING * old + (1 - _SMOOTHING) * new
