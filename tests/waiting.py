"""Waiting for what other tasks, threads or processes bring about."""

import asyncio
from collections.abc import Callable


async def wait_for(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Return once a condition holds; raise `TimeoutError` if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)
