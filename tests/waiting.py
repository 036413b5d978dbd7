"""Waiting for what other tasks, threads or processes bring about."""

import asyncio
import time
from collections.abc import Callable


async def wait_for(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Return once a condition holds; raise `TimeoutError` if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    """Do the same without an event loop."""
    ends = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(0.01)
