"""Time that tests move."""

import random
from collections.abc import Callable


class Clock:
    """Takes the place of `time.perf_counter`; a test sets `now`.

    Args:
        tick: seconds that each look at the clock takes.
    """

    def __init__(self, now: float = 0.0, *, tick: float = 0.0) -> None:
        self.now, self.tick = now, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def erratic_clock() -> Callable[[], float]:
    """Return a clock by which every draft length looks best for a while."""
    chance, now = random.Random(0), 0.0

    def clock() -> float:
        nonlocal now
        now += chance.choice([0.1, 1.0, 5.0])
        return now

    return clock
