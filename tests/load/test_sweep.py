"""A sweep ends at the highest load that holds."""

import pytest

from tests.load.summary import summarize
from tests.load.sweep import RESOLUTION, Level, capacity, search


def levels_of(limit: float, *, first: float, highest: float, is_whole: bool) -> list[Level]:
    steps = search(first=first, highest=highest, is_whole=is_whole)
    levels: list[Level] = []
    load = next(steps)
    try:
        while True:
            levels.append(Level("a", load, summarize([], None), holds=load <= limit))
            load = steps.send(levels[-1].holds)
    except StopIteration:
        return levels


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 11, 16, 37, 100])
def test_users_are_found_within_the_resolution(limit: int) -> None:
    levels = levels_of(limit, first=1, highest=256, is_whole=True)
    found = capacity(levels, "a")
    assert limit / (1 + RESOLUTION) - 1 < found <= limit
    assert all(level.load == int(level.load) for level in levels)
    assert len({level.load for level in levels}) == len(levels) <= 13


@pytest.mark.parametrize("limit", [0.5, 0.7, 3.3, 20.0])
def test_rates_are_found_within_the_resolution(limit: float) -> None:
    found = capacity(levels_of(limit, first=0.5, highest=64, is_whole=False), "a")
    assert limit / (1 + RESOLUTION) <= found <= limit


def test_the_highest_load_is_never_passed() -> None:
    levels = levels_of(1000, first=3, highest=20, is_whole=True)
    assert [level.load for level in levels] == [3, 6, 12, 20]
    assert capacity(levels, "a") == 20


def test_a_level_that_holds_by_luck_above_one_that_does_not_is_no_capacity() -> None:
    levels = [Level("a", load, summarize([], None), holds) for load, holds in [(1, True), (2, False), (3, True)]]
    assert capacity([*levels, Level("b", 9, summarize([], None), True)], "a") == 1
