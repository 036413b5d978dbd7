"""Passes between two proposals: how many fit before the next request, and launching them one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.drafting.model.token_drawer import Drawn, TokenDrawer
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch
from engine.protocols import Draft, ProposeRow
from engine.sampling.logits import Run
from engine.sampling.noise import Draws
from engine.stats.drafts import RunAheadStats
from engine.stats.preparation import PREPARATION

WIDTHS = (4, 6, 8, 12, 16, 20, 24)
_SMOOTHING = 0.9
_LONGEST_ROUND_S = 1.0
_SLACK = 0.8
_PROBE_ROUNDS = 50
"""After so many rounds without a measured pass, a round measures again, because passes may be faster by now."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass to launch; `runs` is the argument of `TokenDrawer.run`, and `take` gets the pass's draws."""

    drawer: TokenDrawer
    batch: ForwardBatch
    draws: Draws | None
    runs: Callable[[], list[Run]]
    take: Callable[[Drawn], None]

    def run(self) -> Drawn:
        return self.drawer.run(self.batch, self.draws, self.runs)


Work = Generator[Pass | None, None, None]
"""A drafter's passes in order: it yields a pass to be launched, or launches the pass and yields None."""


class Pace:
    """Measured times of passes and rounds, and how many branches fit between two requests.

    Attributes:
        width: index into `WIDTHS`: how many branches or nodes a pass computes per request.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.width = WIDTHS.index(8)
        self._step_s: float | None = None
        self._pass_s = 0.0
        self._num_unmeasured = 0
        self._gap_s: float | None = None
        self._answered = self._finished = 0.0

    def observe_request(self, arrived: float, *, is_late: bool) -> None:
        """Measure the time since the last answer and adapt the width; `is_late`: too little was prepared."""
        gap = arrived - self._answered
        if not self._answered or gap > _LONGEST_ROUND_S:
            return  # the first request, or the drafter was idle
        self._gap_s = _smooth(self._gap_s, gap)
        self._num_unmeasured = 0 if self._is_probing else self._num_unmeasured + 1
        if is_late:
            self.width = max(0, self.width - 1)
        elif self._answered < self._finished < self._answered + _SLACK * gap:
            self.width = min(len(WIDTHS) - 1, self.width + 1)

    def observe_answer(self) -> None:
        self._answered = self._clock()

    def observe_finish(self) -> None:
        self._finished = self._clock()

    @property
    def has_time(self) -> bool:
        """Whether at least half of a pass is likely to fit before the next request."""
        if self._gap_s is None or self._is_probing:
            return True
        return self._clock() - self._answered + self._pass_s / 2 < self._gap_s

    @property
    def due(self) -> float:
        return self._answered + (self._gap_s or 0.0)

    @property
    def _is_probing(self) -> bool:
        return self._num_unmeasured >= _PROBE_ROUNDS

    def observe_pass(self, seconds: float) -> None:
        """Record the time of a pass that ran ahead; after `_PROBE_ROUNDS`, forget earlier times."""
        self._pass_s = _smooth(None if self._is_probing else self._pass_s or None, seconds)
        self._num_unmeasured = 0

    def observe_late_steps(self, seconds: float, num_steps: int) -> None:
        """Record the time of draft steps that the target waited for."""
        self._step_s = _smooth(self._step_s, seconds / num_steps)

    def slowdown(self, num_steps: int) -> float:
        """Return the relative round time with `num_steps` late draft steps; 1 until steps and rounds are timed."""
        if self._step_s is None or not self._gap_s:
            return 1.0
        return 1 + num_steps * self._step_s / self._gap_s


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else _SMOOTHING * old + (1 - _SMOOTHING) * new


class PassesAhead(ABC):
    """Launches passes between two proposals; subclasses choose the passes and keep the cache."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self.stats = RunAheadStats()
        self._backend = backend
        self.clock = clock
        self._pace = Pace(clock)
        self._work: Work | None = None
        self._next_pass: Pass | None = None
        self._unsettled: Callable[[], None] | None = None
        """Brings the cache up to date after prepared drafts were sent."""
        self._launched: float | None = None
        self._is_mid_pass = False
        self._num_passes = 0
        self._proposed: list[str] = []

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        arrived = self.clock()
        self._is_mid_pass = self._launched is not None and self._backend.is_busy  # not with another lease's pass
        self._launched = None
        with torch.inference_mode():
            self.settle()
            self._proposed = [row.request.request_id for row in rows]
            # Rows are used until the next proposal; the requests' owner may append tokens before that.
            drafts = self._propose([replace(row, request=row.request.copy()) for row in rows], arrived)
        self._pace.observe_answer()
        return drafts

    @property
    def has_time(self) -> bool:
        """Whether a pass is left, of which half is likely to fit before the next request."""
        return self._work is not None and self._pace.has_time

    @property
    def due(self) -> float:
        return self._pace.due

    @property
    def is_computing(self) -> bool:
        return self._backend.is_busy

    def next_pass(self) -> Pass | None:
        """Return the pass to launch next, None if there is none or it was launched; the cache must be settled."""
        if self._next_pass is None and self._work is not None:
            started, num_prepared = self.clock(), PREPARATION.counts.total()
            try:
                self._next_pass = next(self._work)
                if self._next_pass is None:
                    self.note_launch(started, num_prepared)
            except StopIteration:
                self._work = None
                self._pace.observe_finish()
        return self._next_pass

    def note_launch(self, started: float, num_prepared: int) -> None:
        """Note that the next pass was launched at `started`, when `num_prepared` kernels were compiled."""
        self._next_pass = None
        # A pass that waited for a compilation says nothing about the next pass's time.
        self._launched = started if PREPARATION.counts.total() == num_prepared else None
        self._num_passes += 1
        self.stats.num_forwards += 1

    def forget(self) -> None:
        """Forget the requests of the last proposal after an error, because their cache entries are uncertain."""
        self.stop()
        for request_id in self._proposed:
            self.release(request_id)

    def end_pass(self) -> None:
        """Time the launched pass if it is over; called before the device gets other work."""
        if self._launched is not None and not self._backend.is_busy:
            self._pace.observe_pass(self.clock() - self._launched)
        self._launched = None

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""

    @abstractmethod
    def stop(self) -> None:
        """Drop what is prepared."""

    @abstractmethod
    def _propose(self, rows: list[ProposeRow], arrived: float) -> list[Draft]:
        """Return a draft per row, and plan the next passes; the cache is settled."""

    @torch.inference_mode()
    def settle(self) -> None:
        """Bring the cache up to date with the last answer; until then no request may be evicted."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            unsettled()

    def _count(self, reason: str | None) -> None:
        if reason is None:
            self.stats.hits += 1
        else:
            self.stats.misses[reason] = self.stats.misses.get(reason, 0) + 1

    def _count_passes(self, *, is_used: bool) -> None:
        self.stats.num_wasted += 0 if is_used else self._num_passes
        self._num_passes = 0
