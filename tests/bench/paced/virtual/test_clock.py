"""Virtual time: it jumps, stands still while something can happen, and each process has its own."""

import asyncio
from time import perf_counter
from types import ModuleType

import pytest

from tests.bench.paced.virtual.clock import Process, VirtualLoop, virtual_time


def run(work):
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def test_sleeping_takes_virtual_time_only():
    async def sleep():
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        return asyncio.get_running_loop().time()

    started = perf_counter()
    assert run(sleep()) == pytest.approx(7200)
    assert perf_counter() - started < 1


def test_waiting_for_what_cannot_happen_is_an_error():
    async def wait():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can happen any more at 0"):
        run(wait())


def test_processes_compute_side_by_side_and_each_one_thing_after_another():
    async def compute():
        loop, (one, other) = asyncio.get_running_loop(), (Process(), Process())

        def work(process):
            process.sleep(2.0)
            return process.clock()

        ends = await asyncio.gather(
            one.compute(work, one), one.compute(work, one, after_s=1.0), other.compute(work, other)
        )
        return ends, loop.time(), one.busy_s

    assert run(compute()) == ([2.0, 5.0, 2.0], 5.0, 5.0)


def test_modules_read_the_clock_of_the_process_that_runs_and_the_real_one_afterwards():
    module = ModuleType("timed")
    import time

    module.time = time

    async def compute():
        await asyncio.sleep(10)
        process = Process()

        def work():
            module.time.sleep(0.5)
            return module.time.perf_counter()

        with virtual_time(module):
            return module.time.monotonic(), await process.compute(work)

    assert run(compute()) == (10.0, 10.5)
    assert module.time is time
