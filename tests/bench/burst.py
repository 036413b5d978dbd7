"""A burst: more requests at once than the service can hold; how soon it refuses, and what a refusal costs.

In three parts: 600 requests at the same time; a full queue and 50 requests a second more than are finished; and the
same with a target that is stopped, so that the CPU time of all processes is that of refusing and of being idle.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from tests.bench.processes import cpu_seconds, stopped
from tests.bench.with_serve import Server
from tests.bench.workload import Workload

BURST = 600
MAX_NUM_SEQS = 32
MAX_QUEUED = 256
NUM_TOKENS = 64
PROMPT = "This PEP proposes a change of the language, and the text before it is as long as a usual prompt. " * 8
SURPLUS_PER_S = 50
STEADY_S = 10.0
IDLE_S = 5.0
PROBE_PAUSE_S = 0.05
RETRY = "Retry-After"


@dataclass(slots=True)
class Answers:
    """How long answers took, in seconds, by status; and what refusals told clients about coming again."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    retry_after: list[int] = field(default_factory=list)

    def add(self, status: int, taken_s: float, retry_after: str | None) -> None:
        """Add an answer."""
        self.seconds.setdefault(status, []).append(taken_s)
        if retry_after is not None:
            self.retry_after.append(int(retry_after))

    def row(self, status: int) -> tuple[str, ...]:
        """Return number, median, 99th percentile and longest time in milliseconds of one status."""
        times = sorted(self.seconds.get(status, []))
        if not times:
            return ("0", "-", "-", "-")
        p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
        return (str(len(times)), *(f"{1000 * value:,.0f}" for value in (median(times), p99, times[-1])))


class Client:
    """Sends completion requests, each on a connection of its own, and asks after the service's health meanwhile."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def complete(self, answers: Answers) -> None:
        """Send a request and note its answer."""
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        await self._ask("POST", "/v1/completions", answers, json=body)

    async def fill(self) -> list[asyncio.Task[None]]:
        """Send requests until all are waiting or running; return the tasks that wait for them."""
        tasks = [asyncio.create_task(self.complete(Answers())) for _ in range(MAX_NUM_SEQS + MAX_QUEUED)]
        while await self.gauge("vllm:num_requests_waiting") < 0.95 * MAX_QUEUED:
            await asyncio.sleep(0.2)
        return tasks

    async def send_steadily(self, rate: float, duration_s: float) -> Answers:
        """Send requests at a rate, whether they are answered or not; return the answers that came meanwhile."""
        answers, tasks = Answers(), []
        started = time.perf_counter()
        for number in range(int(rate * duration_s)):
            await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self.complete(answers)))
        await asyncio.wait(tasks, timeout=2)
        await cancel(tasks)
        return answers

    async def probe(self, path: str, answers: Answers) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self._ask("GET", path, answers)
            await asyncio.sleep(PROBE_PAUSE_S)

    async def gauge(self, name: str) -> float:
        """Return the sum of a gauge in /metrics."""
        async with self._session.get("/metrics", raise_for_status=True) as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    async def _ask(self, method: str, path: str, answers: Answers, **body: Any) -> None:
        started = time.perf_counter()
        async with self._session.request(method, path, **body) as answer:
            await answer.read()
            answers.add(answer.status, time.perf_counter() - started, answer.headers.get(RETRY))


@contextmanager
def probing(client: Client, paths: dict[str, Answers]) -> Iterator[None]:
    """Ask each path again and again while the block runs."""
    tasks = [asyncio.create_task(client.probe(path, answers)) for path, answers in paths.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Give requests up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Burst:
    """What was measured."""

    at_once: Answers = field(default_factory=Answers)
    steady: Answers = field(default_factory=Answers)
    health: dict[str, Answers] = field(default_factory=lambda: {"/health": Answers(), "/metrics": Answers()})
    drained_s: float = 0.0
    cpu_ms: dict[str, float] = field(default_factory=dict)
    """CPU time of one refusal, by process."""

    async def run(self, url: str, cpu: Callable[[], dict[str, float]], pid: int) -> None:
        """Measure all three parts."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            client = Client(session)
            await asyncio.gather(*(client.complete(Answers()) for _ in range(MAX_NUM_SEQS)))
            started = time.perf_counter()
            with probing(client, self.health):
                await asyncio.gather(*(client.complete(self.at_once) for _ in range(BURST)))
            self.drained_s = time.perf_counter() - started
            rate = len(self.at_once.seconds.get(200, [])) / self.drained_s
            waiting = await client.fill()
            self.steady = await client.send_steadily(rate + SURPLUS_PER_S, STEADY_S)
            await cancel(waiting)
            waiting = await client.fill()
            with stopped(pid, "target"):
                await self._measure_cost(client, cpu)
            await cancel(waiting)

    async def _measure_cost(self, client: Client, cpu: Callable[[], dict[str, float]]) -> None:
        await client.send_steadily(SURPLUS_PER_S, 2.0)  # what still had room is waiting now
        start = cpu()
        await asyncio.sleep(IDLE_S)
        idle = cpu()
        began = time.perf_counter()
        answers = await client.send_steadily(SURPLUS_PER_S, STEADY_S)
        taken_s, end = time.perf_counter() - began, cpu()
        count = len(answers.seconds.get(429, []))
        for name, seconds in end.items():
            idle_s = (idle[name] - start[name]) * taken_s / IDLE_S
            self.cpu_ms[name] = 1000 * (seconds - idle[name] - idle_s) / max(1, count)


def burst(workload: Workload, console: Console) -> list[str]:
    """Measure and show the figures; return the failures."""
    server = Server(workload, {"max_num_seqs": MAX_NUM_SEQS, "max_queued_requests": MAX_QUEUED})
    try:
        run = Burst()
        asyncio.run(run.run(server.url, lambda: cpu_seconds(server.pid), server.pid))
        num_tracebacks = server.log.count("Traceback (most recent call last)")
    finally:
        server.stop()
    table = Table(title=f"{BURST} requests at once, room for {MAX_NUM_SEQS + MAX_QUEUED}; milliseconds")
    for column in ("answer", "number", "median", "p99", "longest"):
        table.add_column(column)
    table.add_row("429, all at once", *run.at_once.row(429))
    table.add_row("200, all at once", *run.at_once.row(200))
    for path, answers in run.health.items():
        table.add_row(f"{path}, meanwhile", *answers.row(200))
    table.add_row(f"429, {SURPLUS_PER_S}/s more than finish", *run.steady.row(429))
    console.print(table)
    refused = {"at once": run.at_once.retry_after, "steady": run.steady.retry_after}
    for name, seconds in refused.items():
        if seconds:
            console.print(f"{RETRY}, {name}: {min(seconds)} to {max(seconds)} s, median {median(seconds):g} s")
    console.print(f"the burst was served in {run.drained_s:.1f} s; {num_tracebacks} tracebacks were logged")
    total = sum(run.cpu_ms.values())
    parts = ", ".join(f"{name} {value:.1f}" for name, value in run.cpu_ms.items())
    console.print(f"CPU of a refusal: {total:.1f} ms ({parts})")
    failures = [f"{path}: {answers.seconds}" for path, answers in run.health.items() if set(answers.seconds) != {200}]
    if not run.at_once.retry_after:
        failures.append("nothing was refused")
    return failures
