"""Sweep: the highest load at which an SLO still holds."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from .summary import Summary

RESOLUTION = 0.1
"""Relative difference of the last level that holds and the first one that does not."""


@dataclass(frozen=True, slots=True)
class Level:
    """What a load made of the requests: `load` is users, or requests per second."""

    arm: str
    load: float
    holds: bool
    summary: Summary


def search(*, first: float, highest: float, is_whole: bool) -> Generator[float, bool, None]:
    """Yield the loads to try, and be sent whether the SLO held: double until it is missed, then halve the interval.

    Args:
        first: the first load.
        highest: the load that is never passed.
        is_whole: whether loads are whole numbers, as users are.
    """
    good, load = 0.0, first
    while (yield load):
        good = load
        if load >= highest:
            return
        load = min(2 * load, highest)
    bad = load
    while good and bad / good > 1 + RESOLUTION and not (is_whole and bad - good <= 1):
        middle = (good + bad) // 2 if is_whole else (good + bad) / 2
        if (yield middle):
            good = middle
        else:
            bad = middle


def capacity(levels: Sequence[Level], arm: str) -> float:
    """Return the highest load that holds, of those below the first one that does not; 0 if the first one does not."""
    highest = 0.0
    for level in sorted(levels, key=lambda level: level.load):
        if level.arm == arm:
            if not level.holds:
                break
            highest = level.load
    return highest
