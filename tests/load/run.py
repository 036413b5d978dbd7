"""Run: the servers of all arms, warmed up and checked; and one load after the other."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .arms import DEFAULT, Arm
from .client import Client, Clock
from .loops import LoopLag, arrival_times, closed_loop, open_loop
from .options import Options
from .plan import Plan, make_plan
from .records import Acceptance, Record
from .server import PATHS, LoadError, Server, read_counters, survey

OnRecord = Callable[[Record], None]
DEFAULT_USERS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: at times, or from users.

    Attributes:
        times: seconds since the start; None is a closed loop.
        num_users: of a closed loop, which ends after `num_requests` or `duration_s`.
    """

    times: Sequence[float] | None = None
    num_users: int = 1
    num_requests: int | None = None
    duration_s: float | None = None

    @property
    def num_expected(self) -> int | None:
        """None if the number of requests depends on the server."""
        return self.num_requests if self.times is None else len(self.times)


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

    def load(self) -> Load:
        """Return the load that the options describe, without a sweep."""
        options = self.options
        if self.plan.times is not None:
            return Load(times=self.plan.times)
        if options.rate is not None:
            return self.open_load(options.rate)
        users = options.concurrency or DEFAULT_USERS
        return Load(num_users=users, num_requests=options.num_requests, duration_s=options.duration_s)

    def open_load(self, rate: float) -> Load:
        """Return arrivals at a rate, for as long as the options say."""
        options = self.options
        times = arrival_times(
            rate,
            options.burstiness or 1.0,
            num_requests=options.num_requests,
            duration_s=options.duration_s,
            seed=options.seed,
        )
        return Load(times)

    async def measure(self, arm: Arm, turn: int, load: Load, on_record: OnRecord) -> list[Record]:
        """Send a load for an arm; returns its requests in the order of their ends."""
        before = await read_counters(self.clients[arm.url])
        measured: list[Record] = []

        def keep(record: Record) -> None:
            measured.append(record)
            on_record(record)

        watch = asyncio.create_task(self.lag.watch())
        try:
            await self._send_all(arm, turn, load, keep)
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

        Raises:
            LoadError: a request fails, or the server does something else.
        """
        before = await read_counters(self.clients[arm.url])
        warming: list[Record] = []
        users = self.options.concurrency or DEFAULT_USERS
        await self._send_all(arm, 0, Load(num_users=users, num_requests=self.options.warmup), warming.append)
        failed = next((record for record in warming if not record.is_ok), None)
        if failed is not None:
            raise LoadError(f"the warm-up of arm {arm.name} fails: {failed.outcome}: {failed.message}")
        after = await read_counters(self.clients[arm.url])
        arm.check(after.since(before) if before is not None and after is not None else None)

    async def _send_all(self, arm: Arm, turn: int, load: Load, on_record: OnRecord) -> None:
        client = self.clients[arm.url]
        # No load finds the prompts of an earlier one in the server's cache, so that the order of arms does not matter.
        salt = secrets.token_hex(8)

        async def send(index: int, due_s: float) -> Record:
            record = Record(index, self.plan.domain(index), due_s, due_s, arm=arm.name, turn=turn)
            await client.send(self.plan.body(index, arm, cache_salt=salt), record, self.clock)
            on_record(record)
            return record

        if load.times is not None:
            await open_loop(send, load.times, self.clock)
        else:
            await closed_loop(send, load.num_users, self.clock, load.num_requests, load.duration_s)


@asynccontextmanager
async def open_run(options: Options) -> AsyncIterator[Run]:
    """Connect to the servers of all arms, make the plan, and warm every arm up.

    Raises:
        LoadError: a server cannot be reached, or is not what an arm is called.
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
