"""Open and closed loops: when requests are sent."""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from .client import Clock
from .records import REJECTED, Record

Send = Callable[[int, float], Coroutine[Any, Any, Record]]
"""Sends the request with a number, which was due at a time on the clock."""
MAX_PAUSE_S = 10.0
"""A user of a closed loop who is refused waits as long as the server asks, but not longer than this."""
_LAG_INTERVAL_S = 0.05


def arrival_times(
    rate: float, burstiness: float = 1.0, *, num_requests: int | None = None, duration_s: float | None = None, seed: int
) -> list[float]:
    """Return when requests arrive, in seconds since the start; as many as asked for, or all within the duration.

    The time between two arrivals is drawn from a gamma distribution whose mean is 1 / rate.

    Args:
        rate: requests per second.
        burstiness: shape of the distribution, with vLLM's meaning: 1 is a Poisson process, below 1 requests come in
            bursts, infinity is one request every 1 / rate seconds.
    """
    rng = random.Random(seed)
    times: list[float] = []
    time_s = 0.0
    while num_requests is None or len(times) < num_requests:
        is_regular = burstiness == float("inf")
        time_s += 1 / rate if is_regular else rng.gammavariate(burstiness, 1 / (rate * burstiness))
        if duration_s is not None and time_s >= duration_s:
            break
        times.append(time_s)
    return times


async def open_loop(send: Send, times: Sequence[float], clock: Clock) -> None:
    """Send a request at each time, however many are still open, and wait for all."""
    start_s = clock.now_s()
    async with asyncio.TaskGroup() as tasks:
        for index, time_s in enumerate(times):
            due_s = start_s + time_s
            if (pause_s := due_s - clock.now_s()) > 0:
                await asyncio.sleep(pause_s)
            tasks.create_task(send(index, due_s))


async def closed_loop(
    send: Send, num_users: int, clock: Clock, num_requests: int | None = None, duration_s: float | None = None
) -> None:
    """Let users send one request after the other, until so many are sent or the time is over."""
    numbers = itertools.count() if num_requests is None else iter(range(num_requests))
    end_s = None if duration_s is None else clock.now_s() + duration_s

    async def be_a_user() -> None:
        for index in numbers:  # shared by all users
            if end_s is not None and clock.now_s() >= end_s:
                return
            record = await send(index, clock.now_s())
            if record.outcome == REJECTED:
                await asyncio.sleep(min(record.retry_after_s or 0.0, MAX_PAUSE_S))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_users):
            tasks.create_task(be_a_user())


@dataclass(slots=True)
class LoopLag:
    """Measures whether this process keeps up: how late a task that sleeps is woken, in seconds.

    A client that is late reports latencies that are too long, so its results mean little.
    """

    lags_s: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.lags_s.append(loop.time() - due_s)
