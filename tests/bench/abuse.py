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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context

import aiohttp
from rich.console import Console
from rich.table import Table

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
STREAM_PROCESSES, LIVE_PROCESSES = 5, 2
"""HAProxy and Ingress, and for streams Router, draft and target."""
STREAM = {"prompt": "This PEP proposes", "max_tokens": 900, "ignore_eos": True, "stream": True}
CONTEXT = 2048
"""The bundled target's."""


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
    statuses: tuple[int, ...] = (400, 413)
    leaves_after_s: float | None = None


def _repeated(head: str, item: str, number: int, tail: str) -> bytes:
    return f"{head}{','.join([item] * number)}{tail}".encode()


def _messages(number: int) -> bytes:
    return _repeated('{"messages":[', json.dumps({"role": "user", "content": "a"}), number, "]}")


def _prompts(number: int, **fields: object) -> Abuse:
    """Return a request for prompts that leave room for one token."""
    prompts = ["the" + " the" * (CONTEXT - 2)] * number
    body = {"prompt": prompts, "max_tokens": 1, "cache_salt": "SALT", **fields}
    return Abuse("/v1/completions", json.dumps(body).encode(), (200, 429))


HEAVY = {
    "a prompt of all the context": _prompts(1),
    "64 of them": _prompts(64),
    "64 of them, echoed 4 times": _prompts(64, n=4, echo=True),
    "12, with all log probabilities": _prompts(12, echo=True, logprobs=20),
}
"""What the bundled target computes for seconds, on two cores, and other targets refuse."""
ABUSES = {
    "a million empty prompts": Abuse("/v1/completions", _repeated('{"prompt":[', "[]", 10**6, "]}")),
    "a million tokens -1": Abuse("/detokenize", _repeated('{"tokens":[', "-1", 10**6, "]}")),
    "a million empty messages": Abuse("/v1/chat/completions", _repeated('{"messages":[', "{}", 10**6, "]}")),
    "90,000 valid messages": Abuse("/v1/chat/completions", _messages(90_000)),
    "the same to /tokenize, left": Abuse("/tokenize", _messages(90_000), leaves_after_s=1.2),
    "1,000 valid messages": Abuse("/tokenize", _messages(1000), (200,)),
    **HEAVY,
}


@dataclass(slots=True)
class Notice:
    """What one client noticed: the longest gap between chunks and answer of `/live`, and its wait for a core itself."""

    gap_s: float = 0.0
    live_s: float = 0.0
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
        self.gap_s = max(self.gap_s, time.perf_counter() - self._last)

    async def _read(self, session: aiohttp.ClientSession) -> None:
        self._last = time.perf_counter()
        while True:
            async with session.post("/v1/completions", json=STREAM, raise_for_status=True) as answer:
                async for now, *_ in data_of_events(answer.content.iter_any(), time.perf_counter):
                    self.gap_s, self._last = max(self.gap_s, now - self._last), now

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
            self.live_s = max(self.live_s, time.perf_counter() - started)
            await asyncio.sleep(PROBE_PAUSE_S)


@dataclass(slots=True)
class Outcome:
    """What came of one kind of abuse, and what another client noticed of it beside a quiet server."""

    name: str
    answers: Counter[int]
    quiet: Notice
    notice: Notice

    @property
    def failures(self) -> list[str]:
        """What the other client should not have noticed."""
        problems, quiet, noticed = [], self.quiet, self.notice
        if set(self.answers) - {0, *ABUSES[self.name].statuses}:
            problems.append(f"{self.name}: answers {dict(self.answers)}")
        if noticed.gap_s > quiet.gap_s + MAX_EXTRA_GAP_S + STREAM_PROCESSES * noticed.late_s:
            problems.append(f"{self.name}: a gap of {noticed.gap_s:.3f} s, normally {quiet.gap_s:.3f} s")
        if noticed.live_s > max(quiet.live_s, MAX_LIVE_S) + LIVE_PROCESSES * noticed.late_s:
            problems.append(f"{self.name}: /live took {noticed.live_s:.3f} s, normally {quiet.live_s:.3f} s")
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
            yield Outcome(name, abusers.result(), quiet, notice)


def _abuse(url: str, name: str, duration_s: float) -> Counter[int]:
    """Send one body again and again; return how often each status came, 0 for none."""
    os.nice(19 - os.nice(0))
    return asyncio.run(_send_all(url, ABUSES[name], duration_s))


async def _send_all(url: str, abuse: Abuse, duration_s: float) -> Counter[int]:
    answers, salts = Counter[int](), itertools.count(time.monotonic_ns())
    ends = time.perf_counter() + duration_s

    async def send(session: aiohttp.ClientSession) -> None:
        while (now := time.perf_counter()) < ends:
            body, status = abuse.body.replace(b"SALT", str(next(salts)).encode()), 0
            with suppress(TimeoutError):
                async with (
                    asyncio.timeout(abuse.leaves_after_s or ends + LAST_ANSWERS_S - now),
                    session.post(abuse.path, data=body, headers={"Content-Type": "application/json"}) as answer,
                ):
                    await answer.read()
                    status = answer.status
            answers[status] += 1

    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(send(session) for _ in range(NUM_ABUSERS)))
    return answers


def show_abuse(rows: list[Outcome], console: Console) -> None:
    title = f"{NUM_ABUSERS} at once for {EACH_S:g} s each; seconds"
    table = Table("body", "answers", "longest gap", "/live", "core", title=title)
    notices = {row.name: row.notice for row in rows} | {"none": rows[0].quiet}
    answers = {row.name: ", ".join(f"{n} x {status or 'left'}" for status, n in row.answers.items()) for row in rows}
    for name, notice in notices.items():
        figures = (notice.gap_s, notice.live_s, notice.late_s)
        table.add_row(name, answers.get(name, ""), *(f"{seconds:.3f}" for seconds in figures))
    console.print(table)
