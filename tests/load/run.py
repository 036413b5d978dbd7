"""Run: the servers of all arms, warmed up and checked; and one load after the other."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from .arms import DEFAULT, Arm
from .client import Client, Clock
from .loops import LoopLag, Send, arrival_times, closed_loop, open_loop
from .options import Options
from .plan import Plan, make_plan
from .records import Acceptance, Record
from .server import PATHS, LoadError, Server, read_counters, survey

OnRecord = Callable[[Record], None]
Load = Callable[[Send], Coroutine[Any, Any, None]]
"""Sends the requests of a load, at times or from users, until all are answered."""
DEFAULT_USERS = 8


@dataclass(slots=True)
class Run:
    """What is measured, and what was measured so far.

    Attributes:
        acceptance: what `/metrics` counted during the loads of each arm; used where requests do not report it.
    """

    options: Options
    plan: Plan
    clients: dict[str, Client]
    clock: Clock = field(default_factory=Clock)
    lag: LoopLag = field(default_factory=LoopLag)
    records: list[Record] = field(default_factory=list)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)

    def load(self, level: float | None = None) -> Load:
        """Return the load that the options describe, or one of a sweep: so many users, or requests per second."""
        options, duration_s, times = self.options, self.options.duration_s, self.plan.times
        if times is None and options.rate is not None:
            burstiness, count = options.burstiness or 1.0, options.num_requests
            rate = level or options.rate
            times = arrival_times(rate, burstiness, num_requests=count, duration_s=duration_s, seed=options.seed)
        if times is not None:
            due = times
            return lambda send: open_loop(send, due, self.clock)
        users = int(level or options.concurrency or DEFAULT_USERS)
        return lambda send: closed_loop(send, users, self.clock, options.num_requests, duration_s)

    async def measure(self, arm: Arm, turn: int, load: Load, on_record: OnRecord) -> list[Record]:
        """Send a load for an arm; returns its requests in the order of their ends."""
        before = await read_counters(self.clients[arm.url])
        watch = asyncio.create_task(self.lag.watch())
        try:
            measured = await self._send_all(arm, turn, load, on_record)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        after = await read_counters(self.clients[arm.url])
        if before is not None and after is not None:
            added = after.since(before)
            arm.check(added)
            self.acceptance[arm.name] = self.acceptance.get(arm.name, Acceptance()) + added.acceptance
        self.records += measured
        return measured

    async def warm_up(self, arm: Arm) -> None:
        """Send the first requests of an arm, which do not count, and check that the server does what the arm says.

        Raises LoadError if a request fails, or the server does something else.
        """
        before = await read_counters(self.clients[arm.url])
        users, count = self.options.concurrency or DEFAULT_USERS, self.options.warmup
        warming = await self._send_all(arm, 0, lambda send: closed_loop(send, users, self.clock, count))
        failed = next((record for record in warming if not record.is_ok), None)
        if failed is not None:
            raise LoadError(f"the warm-up of arm {arm.name} fails: {failed.outcome}: {failed.message}")
        after = await read_counters(self.clients[arm.url])
        arm.check(after.since(before) if before is not None and after is not None else None)

    async def _send_all(
        self, arm: Arm, turn: int, load: Load, on_record: OnRecord = lambda record: None
    ) -> list[Record]:
        # No load finds the prompts of an earlier one in the server's cache, so that the order of arms does not matter.
        client, salt, records = self.clients[arm.url], secrets.token_hex(8), list[Record]()

        async def send(index: int, due_s: float) -> Record:
            record = Record(index, self.plan.domain(index), due_s, due_s, arm=arm.name, turn=turn)
            await client.send(self.plan.body(index, arm, cache_salt=salt), record, self.clock)
            records.append(record)
            on_record(record)
            return record

        await load(send)
        return records


@asynccontextmanager
async def open_run(options: Options) -> AsyncIterator[Run]:
    """Connect to the servers of all arms, make the plan, and warm every arm up.

    Raises LoadError if a server cannot be reached, or is not what an arm is called.
    """
    path = PATHS[options.endpoint]
    clients = {
        url: Client(url, path, api_key=options.api_key, timeout_s=options.timeout)
        for url in dict.fromkeys(arm.url for arm in options.arm_list)
    }
    try:
        servers: dict[str, Server] = {}
        for url, client in clients.items():
            servers[url] = await survey(client, options.endpoint, options.model)
        first = options.arm_list[0]
        for arm in options.arm_list:
            if arm.name != DEFAULT and not servers[arm.url].has_extensions:
                raise LoadError(f"arm {arm.name}: {arm.url} does not take the field `speculative`")
        plan = await make_plan(options, clients[first.url], servers[first.url])
        run = Run(options, plan, clients)
        for arm in options.arm_list:
            await run.warm_up(arm)
        run.clock = Clock()
        yield run
    finally:
        for client in clients.values():
            await client.close()
