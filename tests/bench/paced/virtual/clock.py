"""Virtual time: an event loop that jumps to its next timer, and processes whose clocks run while they compute.

What a process computes takes no virtual time by itself. Time passes only where something sleeps: a pass for as long as
the roofline says, a message on its way, and the work of a host for as long as `wire.Costs` says.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 and moves only when all tasks wait: then it jumps to the next timer.

    Raises RuntimeError if all tasks wait for something that cannot happen.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise RuntimeError(f"nothing can happen any more at {self._now:.6f} s of virtual time")
        self._now += max(0.0, seconds)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The loop's own socket is ready if a thread has called it.
        ready = super().select(0)
        if not ready:
            self._jump(timeout)
        return ready


async def sleep_until(moment: float) -> None:
    """Wait until the loop's time is `moment`; at least let others run."""
    await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))


class Process:
    """A process with one thread and a clock of its own, which may be ahead of the loop's while it computes."""

    _running: "Process | None" = None

    def __init__(self) -> None:
        self._now = 0.0

    def clock(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    async def compute(self, function: Callable[..., T], *arguments: Any, after_s: float = 0.0) -> T:
        """Call a function that sleeps on this process's clock, `after_s` of other work; return when that is over."""
        self._now = max(self._now, asyncio.get_running_loop().time()) + after_s
        Process._running = self
        try:
            result = function(*arguments)
        finally:
            Process._running = None
        await sleep_until(self._now)
        return result

    async def spend(self, seconds: float) -> None:
        """Work for so long, once earlier work is done."""
        await self.compute(self.sleep, seconds)


class _Time:
    """Stands for the module `time`: its clocks are those of the process that runs, else of the event loop."""

    def perf_counter(self) -> float:
        process = Process._running
        return asyncio.get_running_loop().time() if process is None else process.clock()

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        assert Process._running is not None, "the event loop may not sleep"
        Process._running.sleep(seconds)


@contextmanager
def virtual_time(*modules: ModuleType) -> Iterator[None]:
    """Within it, `time` in these modules is virtual."""
    before = [module.time for module in modules]
    assert before == [time] * len(modules)
    for module in modules:
        module.time = _Time()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.time = time  # type: ignore[attr-defined]
