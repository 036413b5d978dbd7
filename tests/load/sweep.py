"""Sweep: the highest load at which an SLO still holds."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.load.summary import Summary

RESOLUTION = 0.1
"""Relative difference of the last level that holds and the first one that does not."""


@dataclass(frozen=True, slots=True)
class Level:
    """What a load made of the requests: `load` is users, or requests per second."""

    arm: str
    load: float
    summary: Summary
    holds: bool


async def find_capacity(
    run_level: Callable[[float], Awaitable[Level]], *, first: float, highest: float, is_whole: bool
) -> list[Level]:
    """Double the load until the SLO is missed, then halve the interval; returns the levels in the order of their loads.

    Args:
        first: the first load.
        highest: the load that is never passed.
        is_whole: whether loads are whole numbers, as users are.
    """
    levels: list[Level] = []
    good, load = 0.0, first
    while True:
        level = await run_level(load)
        levels.append(level)
        if not level.holds:
            break
        good = load
        if load >= highest:
            return levels
        load = min(2 * load, highest)
    bad = load
    while good and (bad - good > 1 if is_whole else True) and bad / good > 1 + RESOLUTION:
        middle = (good + bad) // 2 if is_whole else (good + bad) / 2
        level = await run_level(middle)
        levels.append(level)
        if level.holds:
            good = middle
        else:
            bad = middle
    return sorted(levels, key=lambda level: level.load)


def capacity(levels: list[Level], arm: str) -> float:
    """Return the highest load that holds, of those below the first one that does not; 0 if the first one does not."""
    highest = 0.0
    for level in levels:
        if level.arm == arm:
            if not level.holds:
                break
            highest = level.load
    return highest
