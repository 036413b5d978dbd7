"""A soak: many clients that send good, bad and abandoned requests; nothing may fail, leak or be left behind."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table
from scipy.stats import theilslopes

from tests.bench.with_serve import Server
from tests.bench.workload import Workload

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
SETTLE_S = 10.0
OWN = ("Ingress", "Router", "TargetWorker", "DraftWorker", "grammar_check")
"""The processes that run this project's code. The others are Ray's, shown and not judged: its HTTP proxy grew by about
3 KB per request over 5,600 requests, nearly all of them refused at the door."""
MAX_MIB_PER_MINUTE = 10.0
"""Of our own processes together, over the second half: in the first one caches fill, and models may be compiled."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
_CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "This PEP proposes", "n": 2}),
    ("/v1/completions", {"prompt": "This PEP proposes", "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["a", "b", "c"], "stop": "e", "presence_penalty": 0.5}),
    ("/v1/completions", {"prompt": "JSON: ", "structured_outputs": {"json": SCHEMA}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[a-z]{1,9}"}, "temperature": 1.2}),
    ("/v1/chat/completions", {**_CHAT, "logprobs": True, "top_logprobs": 3}),
    ("/v1/chat/completions", {**_CHAT, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {**_CHAT, "speculative": {"enabled": False}}),
]
BAD: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**8}),
    ("/v1/completions", {"prompt": "x" * 100_000}),
    ("/v1/completions", {"prompt": [2**30]}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(a"}}),
    ("/v1/completions", ["no object"]),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {**_CHAT, "tool_choice": "required"}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
    ("/v1/nothing", {}),
]


@dataclass(slots=True)
class Soak:
    """What was sent, what came back, and what was left.

    Attributes:
        answers: kind of request and status to how many; status 0 is a request that its client gave up.
        memory: seconds since the start, and bytes by process.
    """

    url: str
    duration_s: float
    measure: Callable[[], dict[str, int]]
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    gauges: dict[str, float] = field(default_factory=dict)

    async def run(self, num_clients: int) -> None:
        """Send requests for the duration, then wait until the server has settled."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60, limits=httpx.Limits()) as client:
            started = time.monotonic()
            sampler = asyncio.create_task(self._sample(started))
            await asyncio.gather(*(self._be_a_client(client, seed, started) for seed in range(num_clients)))
            sampler.cancel()
            deadline = time.monotonic() + SETTLE_S
            while time.monotonic() < deadline:
                self.gauges = await self._read_gauges(client)
                if not any(self.gauges.values()):
                    break
                await asyncio.sleep(0.1)

    def mib_per_minute(self, *names: str) -> float:
        """Return how these processes' memory grows over the second half: the median slope."""
        late = [
            (at, sum(sizes.get(name, 0) for name in names)) for at, sizes in self.memory if at > self.duration_s / 2
        ]
        if len(late) < 3:
            return 0.0
        seconds, sizes = zip(*late, strict=True)
        return float(theilslopes(sizes, seconds).slope) * 60 / 2**20

    def failures(self) -> list[str]:
        """Return everything that should not have happened."""
        found = list(self.errors)
        found += [f"{name} is {value} at the end" for name, value in self.gauges.items() if value]
        found += [f"{name} is missing" for name in GAUGES if name not in self.gauges]
        return found

    async def _be_a_client(self, client: httpx.AsyncClient, seed: int, started: float) -> None:
        choices = random.Random(seed)
        while time.monotonic() - started < self.duration_s:
            kind = choices.choices(["good", "bad", "abandoned"], [6, 2, 2])[0]
            path, body = choices.choice(BAD if kind == "bad" else GOOD)
            if kind != "bad":
                body = {"max_tokens": choices.randint(1, 24), "seed": choices.getrandbits(30), **body}
                body["stream"] = choices.random() < 0.5
            try:
                status = await self._send(
                    client, path, body, give_up_s=choices.random() if kind == "abandoned" else None
                )
            except httpx.HTTPError as error:
                self.errors.append(f"{kind} {path}: {error!r}")
                continue
            self.answers[kind, status] += 1
            expected = {"good": (200,), "abandoned": (0, 200), "bad": (400, 404)}[kind]
            if status not in expected:
                self.errors.append(f"{kind} {path} {str(body)[:200]}: {status}")

    async def _send(self, client: httpx.AsyncClient, path: str, body: Any, *, give_up_s: float | None) -> int:
        """Return the status; 0 if the client gave up before the end."""
        try:
            async with asyncio.timeout(give_up_s), client.stream("POST", path, json=body) as answer:
                text = (await answer.aread()).decode()
        except TimeoutError:
            return 0
        if answer.status_code == 200 and '"error":{' in text:
            self.errors.append(f"{path}: {text[-300:]}")
        return answer.status_code

    async def _sample(self, started: float) -> None:
        while True:
            self.memory.append((time.monotonic() - started, self.measure()))
            await asyncio.sleep(0.5)

    async def _read_gauges(self, client: httpx.AsyncClient) -> dict[str, float]:
        lines = (await client.get("/metrics")).raise_for_status().text.splitlines()
        return {
            name: float(line.rpartition(" ")[2]) for name in GAUGES for line in lines if line.startswith(f"{name}{{")
        }


def memory_of(pid: int) -> dict[str, int]:
    """Return the bytes that a process and all under it hold for themselves (unique set size); Ray's are one."""
    totals = dict.fromkeys([*OWN, "Ray"], 0)
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            title = " ".join(process.cmdline())
            totals[next((name for name in OWN if name in title), "Ray")] += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return totals


def soak(workload: Workload, console: Console, *, num_clients: int = 16, duration_s: float = 120.0) -> list[str]:
    """Soak the served application, show what happened and return the failures."""
    server = Server(workload, {})
    try:
        run = Soak(server.url, duration_s, lambda: memory_of(server.pid))
        asyncio.run(run.run(num_clients))
    finally:
        server.stop()
    table = Table(title=f"{num_clients} clients, {duration_s:g} s; status 0 is a request that its client gave up")
    for column in ("kind", "status", "requests"):
        table.add_column(column)
    for (kind, status), count in sorted(run.answers.items()):
        table.add_row(kind, str(status), f"{count:,}")
    console.print(table)
    table = Table(title="MiB of memory; its growth is that of the second half, after the caches have filled")
    for column in ("process", "at first", "at last", "MiB/min"):
        table.add_column(column)
    for name in (*OWN, "Ray"):
        first, last = (run.memory[i][1][name] / 2**20 for i in (0, -1))
        table.add_row(name, f"{first:,.0f}", f"{last:,.0f}", f"{run.mib_per_minute(name):+.1f}")
    console.print(table)
    growth = run.mib_per_minute(*OWN)
    console.print(f"our own processes together: {growth:+.1f} MiB/min, at most {MAX_MIB_PER_MINUTE:+g} are allowed")
    found = run.failures()
    if growth > MAX_MIB_PER_MINUTE:
        found.append(f"memory grows by {growth:.1f} MiB/min, at most {MAX_MIB_PER_MINUTE:g} are allowed")
    return found
