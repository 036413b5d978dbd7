"""PassesAhead: how a drafter launches passes between two proposals, one at a time, and what they were worth."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator

import torch

from engine.drafting.run_ahead.pace import Pace
from engine.execution.backend import Backend
from engine.stats import RunAheadStats


class PassesAhead(ABC):
    """The passes of a drafter between two proposals, their times, and what they were worth.

    Attributes:
        stats: counters of proposals and passes.
    """

    backend: Backend

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without work; `clock` (seconds, from any start) measures passes and rounds."""
        self.stats = RunAheadStats()
        self._clock = clock
        self._pace = Pace(clock)
        self._work: Generator[None, None, None] | None = None
        """What is to be prepared; yields after every pass that it has launched."""
        self._launched: float | None = None
        self._num_passes = 0

    @property
    def has_time(self) -> bool:
        """Whether `advance` should be called: half a pass is likely to fit before the next request."""
        return not self._is_settled or self._pace.has_time

    @property
    def is_computing(self) -> bool:
        """Whether a pass is under way on the device; until it is over, `advance` does nothing."""
        return self.backend.is_busy

    def advance(self) -> bool:
        """Settle the last answer, or launch one forward pass ahead; return whether there is more to do.

        At most one pass is under way, so that a verdict that nothing was prepared for waits for one pass at most.
        """
        if self.backend.is_busy:
            return True
        with torch.inference_mode():
            self._observe_pass()
            if not self._is_settled:
                self._settle()
            elif self._work is not None:
                self._step()
        return self._work is not None

    @property
    @abstractmethod
    def _is_settled(self) -> bool:
        """Whether the cache is up to date with the drafts that were sent."""

    @abstractmethod
    def _settle(self) -> None:
        """Bring the cache up to date with the drafts that were sent."""

    def _begin_proposal(self) -> float:
        """Settle the last answer; return when the request came."""
        arrived = self._clock()
        self._launched = None
        self._settle()
        return arrived

    def _count(self, reason: str | None) -> None:
        """Count a draft that was prepared, or the reason why it was not."""
        if reason is None:
            self.stats.hits += 1
        else:
            self.stats.misses[reason] = self.stats.misses.get(reason, 0) + 1

    def _count_passes(self, *, is_used: bool) -> None:
        """Count the passes since the last proposal as wasted, if none of their results is used."""
        self.stats.num_wasted += 0 if is_used else self._num_passes
        self._num_passes = 0

    def _step(self) -> None:
        """Launch one forward pass ahead."""
        assert self._work is not None
        started = self._clock()
        try:
            next(self._work)
            self._launched = started
            self._num_passes += 1
            self.stats.num_forwards += 1
        except StopIteration:
            self._work = None
            self._pace.observe_finish()

    def _observe_pass(self) -> None:
        """Take the time of the pass that is over, if one was launched since the last request."""
        if self._launched is not None:
            self._pace.observe_pass(self._clock() - self._launched)
            self._launched = None
