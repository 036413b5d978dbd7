"""IdleTimer: interrupts waits that last too long, with one timer for the many short waits of a stream.

`asyncio.timeout` makes a timer for each wait, which takes 20 microseconds on uvloop; a stream waits for each chunk.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class IdleTimer:
    """Limits waits, of which there is one at a time; it must be closed."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._task: asyncio.Task[object] | None = None
        self._started = 0.0
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, awaitable: Awaitable[T]) -> T | None:
        """Return the awaitable's result; after the limit, cancel it and return None."""
        task = self._task = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        self._started = asyncio.get_running_loop().time()
        if self._timer is None:
            self._start_timer(self._limit_s)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if not self._is_due or task.uncancel() > num_cancels:
                raise  # cancelled by somebody else
            return None
        finally:
            self._task, self._is_due = None, False

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)

    def _check(self) -> None:
        """Interrupt the wait if it has lasted for the limit; otherwise look again when it may have."""
        self._timer = None
        if self._task is None:
            return  # the next wait starts the timer
        left_s = self._started + self._limit_s - asyncio.get_running_loop().time()
        if left_s > 0:
            self._start_timer(left_s)
        else:
            self._is_due = True
            self._task.cancel()
