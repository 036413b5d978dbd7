"""Waits that are interrupted after a limit, and by nobody else's cancellation."""

import asyncio
from collections.abc import Iterator

import pytest

from deployments.ingress.idle_timer import IdleTimer


@pytest.fixture
def timer() -> Iterator[IdleTimer]:
    timer = IdleTimer(0.02)
    yield timer
    timer.close()


async def number(delay_s: float) -> int:
    await asyncio.sleep(delay_s)
    return 5


async def test_a_short_wait_has_its_result(timer: IdleTimer) -> None:
    assert await timer.wait(number(0)) == 5


async def test_a_wait_that_lasts_too_long_is_cancelled_each_time(timer: IdleTimer) -> None:
    for _ in range(3):
        assert await timer.wait(number(60)) is None
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    assert await timer.wait(number(0)) == 5


async def test_many_short_waits_are_none_that_lasts_too_long(timer: IdleTimer) -> None:
    """Together they last for three limits, so that the one timer looks several times."""
    assert [await timer.wait(number(0.002)) for _ in range(30)] == [5] * 30


async def test_an_error_is_passed_on(timer: IdleTimer) -> None:
    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await timer.wait(fail())


@pytest.mark.parametrize("is_due", [False, True], ids=["alone", "at the same moment as the timer"])
async def test_a_wait_that_somebody_else_cancels_is_cancelled(timer: IdleTimer, is_due: bool) -> None:
    waiting = asyncio.create_task(timer.wait(number(60)))
    await asyncio.sleep(0)
    if is_due:
        timer._started -= 60.0
        timer._check()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_between_waits_nothing_is_cancelled(timer: IdleTimer) -> None:
    assert await timer.wait(number(0)) == 5
    await asyncio.sleep(0.05)
    assert await timer.wait(number(60)) is None
