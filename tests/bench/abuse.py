"""Abuse: bodies that cost their sender nothing, 16 at once, and the largest valid ones; what another client notices.

The other client reads a stream, and asks after `/live` ten times a second. What it notices is the longest time between
two chunks, beside that of a quiet server, and the longest answer of `/live`. The abusers are a process of their own, of
the lowest priority, because elsewhere they would not take the server's cores. On a machine that others use, each
process of the way waits for a core as well; how long, the client sees by itself.
"""

import asyncio
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context

import aiohttp
from rich.console import Console
from rich.table import Table

from tests.bench.contestants.with_serve import Server
from tests.bench.workload import Workload
from tests.load.client import data_of_events

NUM_ABUSERS = 16
QUIET_S = 4.0
EACH_S = 12.0
LAST_ANSWERS_S = 1.0
"""How long the abusers wait for their last answers; the largest valid bodies keep two cores busy for minutes."""
PROBE_PAUSE_S = 0.1
MAX_EXTRA_GAP_S = 0.25
MAX_LIVE_S = 0.1
HEARTBEAT_S = 0.01
STREAM_PROCESSES = 5
"""HAProxy, Ingress, Router, draft and target."""
LIVE_PROCESSES = 2
"""HAProxy and Ingress."""
STREAM = {"prompt": "This PEP proposes", "max_tokens": 900, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class Abuse:
    """A request that is sent again and again.

    Attributes:
        body: in it, `SALT` stands for a number that is new in every request, so that nothing of its prompt is cached.
        statuses: what it may be answered with.
        leaves_after_s: when the client gives up.
    """

    path: str
    body: bytes
    statuses: tuple[int, ...]
    leaves_after_s: float | None = None


def _repeated(head: str, item: str, number: int, tail: str) -> bytes:
    return f"{head}{','.join([item] * number)}{tail}".encode()


def _prompts(number: int, **fields: object) -> bytes:
    """Return a request for prompts that leave room for one token."""
    prompts = ["the" + " the" * (CONTEXT - 2)] * number
    return json.dumps({"prompt": prompts, "max_tokens": 1, "cache_salt": "SALT", **fields}).encode()


CONTEXT = 2048
"""The bundled target's."""
MESSAGE = json.dumps({"role": "user", "content": "a"})
ABUSES = {
    "a million empty prompts": Abuse("/v1/completions", _repeated('{"prompt":[', "[]", 10**6, "]}"), (400, 413)),
    "a million tokens -1": Abuse("/detokenize", _repeated('{"tokens":[', "-1", 10**6, "]}"), (400, 413)),
    "a million empty messages": Abuse(
        "/v1/chat/completions", _repeated('{"messages":[', "{}", 10**6, "]}"), (400, 413)
    ),
    "90,000 valid messages": Abuse(
        "/v1/chat/completions", _repeated('{"messages":[', MESSAGE, 90_000, "]}"), (400, 413)
    ),
    "the same to /tokenize, left": Abuse(
        "/tokenize", _repeated('{"messages":[', MESSAGE, 90_000, "]}"), (400, 413), leaves_after_s=1.2
    ),
    "1,000 valid messages": Abuse("/tokenize", _repeated('{"messages":[', MESSAGE, 1000, "]}"), (200,)),
    "a prompt of all the context": Abuse("/v1/completions", _prompts(1), (200, 429)),
    "64 of them": Abuse("/v1/completions", _prompts(64), (200, 429)),
    "64 of them, echoed 4 times": Abuse("/v1/completions", _prompts(64, n=4, echo=True), (200, 429)),
    "12, with all log probabilities": Abuse("/v1/completions", _prompts(12, echo=True, logprobs=20), (200, 429)),
}
HEAVY = ("a prompt of all the context", "64 of them", "64 of them, echoed 4 times", "12, with all log probabilities")
"""What the bundled target computes for seconds, on two cores, and other targets refuse."""


@dataclass(slots=True)
class Notice:
    """What one client noticed: gaps between chunks and answers of `/live`, and how long it waited for a core itself."""

    gaps_s: list[float] = field(default_factory=list)
    live_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    _last: float = 0.0

    async def watch(self, url: str, duration_s: float) -> None:
        """Read streams and ask after `/live` for the duration."""
        async with aiohttp.ClientSession(url) as session:
            tasks = [asyncio.create_task(task) for task in (self._read(session), self._probe(session), self._beat())]
            done, _ = await asyncio.wait(tasks, timeout=duration_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()
        self.gaps_s.append(time.perf_counter() - self._last)

    async def _read(self, session: aiohttp.ClientSession) -> None:
        self._last = time.perf_counter()
        while True:
            async with session.post("/v1/completions", json=STREAM, raise_for_status=True) as answer:
                async for now, *_ in data_of_events(answer.content.iter_any(), time.perf_counter):
                    self.gaps_s.append(now - self._last)
                    self._last = now

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self.late_s = max(self.late_s, time.perf_counter() - due)

    async def _probe(self, session: aiohttp.ClientSession) -> None:
        while True:
            started = time.perf_counter()
            async with session.get("/live", raise_for_status=True) as answer:
                await answer.read()
            self.live_s.append(time.perf_counter() - started)
            await asyncio.sleep(PROBE_PAUSE_S)


@dataclass(slots=True)
class Outcome:
    """What came of one kind of abuse, and what another client noticed of it beside a quiet server."""

    name: str
    answers: Counter[int]
    longest_answer_s: float
    quiet: Notice
    notice: Notice

    def failures(self, statuses: Iterable[int]) -> list[str]:
        """Return what the other client should not have noticed."""
        problems = []
        if set(self.answers) - {0, *statuses}:
            problems.append(f"{self.name}: answers {dict(self.answers)}")
        gap_s, normal_s = max(self.notice.gaps_s), max(self.quiet.gaps_s)
        if gap_s > normal_s + MAX_EXTRA_GAP_S + STREAM_PROCESSES * self.notice.late_s:
            problems.append(f"{self.name}: a gap of {gap_s:.3f} s, normally {normal_s:.3f} s")
        live_s, normal_s = max(self.notice.live_s), max(self.quiet.live_s)
        if live_s > max(normal_s, MAX_LIVE_S) + LIVE_PROCESSES * self.notice.late_s:
            problems.append(f"{self.name}: /live took {live_s:.3f} s, normally {normal_s:.3f} s")
        return problems


def outcomes(url: str, names: list[str], each_s: float) -> Iterator[Outcome]:
    """Abuse a server in each of these ways for some seconds, and yield what came of it."""
    quiet = Notice()
    asyncio.run(quiet.watch(url, QUIET_S))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(len, ()).result()  # it has started
        for name in names:
            abusers = pool.submit(_abuse, url, name, each_s)
            notice = Notice()
            asyncio.run(notice.watch(url, each_s))
            answers, longest_s = abusers.result()
            yield Outcome(name, answers, longest_s, quiet, notice)


def _abuse(url: str, name: str, duration_s: float) -> tuple[Counter[int], float]:
    """Send one body again and again; return how often each status came, 0 for none, and the longest wait for one."""
    os.nice(19 - os.nice(0))
    return asyncio.run(_send_all(url, ABUSES[name], duration_s))


async def _send_all(url: str, abuse: Abuse, duration_s: float) -> tuple[Counter[int], float]:
    answers: Counter[int] = Counter()
    longest_s = 0.0
    salts = itertools.count(time.monotonic_ns())
    ends = time.perf_counter() + duration_s

    async def send(session: aiohttp.ClientSession) -> None:
        nonlocal longest_s
        headers = {"Content-Type": "application/json"}
        while time.perf_counter() < ends:
            body = abuse.body.replace(b"SALT", str(next(salts)).encode())
            started, status = time.perf_counter(), 0
            leaves_after_s = abuse.leaves_after_s or ends + LAST_ANSWERS_S - started
            with suppress(TimeoutError):
                async with (
                    asyncio.timeout(leaves_after_s),
                    session.post(abuse.path, data=body, headers=headers) as answer,
                ):
                    await answer.read()
                    status = answer.status
            answers[status] += 1
            longest_s = max(longest_s, time.perf_counter() - started)

    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(send(session) for _ in range(NUM_ABUSERS)))
    return answers, longest_s


def abuse(workload: Workload, console: Console) -> list[str]:
    server = Server(workload, {})
    try:
        rows = list(outcomes(server.url, list(ABUSES), EACH_S))
    finally:
        server.stop()
    table = Table(title=f"{NUM_ABUSERS} at once for {EACH_S:g} s each; seconds")
    for column in ("body", "answers", "longest answer", "longest gap", "/live", "core"):
        table.add_column(column)
    for row in rows:
        answers = ", ".join(f"{number} x {status or 'left'}" for status, number in sorted(row.answers.items()))
        gap_s, live_s = max(row.notice.gaps_s), max(row.notice.live_s)
        figures = (
            f"{row.longest_answer_s:.2f}",
            f"{gap_s:.3f}",
            f"{live_s:.3f}",
            f"{row.notice.late_s:.3f}",
        )
        table.add_row(row.name, answers, *figures)
    quiet = rows[0].quiet
    table.add_row("none", "", "", f"{max(quiet.gaps_s):.3f}", f"{max(quiet.live_s):.3f}", f"{quiet.late_s:.3f}")
    console.print(table)
    return [problem for row in rows for problem in row.failures(ABUSES[row.name].statuses)]
