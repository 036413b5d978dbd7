"""Leases: a group's use of a draft worker, which is its own or serves other groups, too."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Protocol

from cluster.remote_drafter import RemoteDrafter
from cluster.transport import Connector, Link
from cluster.worker_set import WorkerDiedError, WorkerSet, results
from cluster.workers.draft_worker import Lease
from engine.errors import ModelError, TargetError

__all__ = ["Lease", "Leases", "OwnDraft", "keep_lease", "wait_for_draft"]

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 4.0
_LONGEST_START_RETRY_S = 30.0
_AVOIDED_S = 30.0
"""Workers that failed are leased again, although there are others, after one that lasted so long."""
_PING_PERIOD_S = 1.0
_GRACE_S = 5.0
"""How long a group whose target has started waits for a draft that loads. Draft and target load at the same time, and
a smaller model takes less, so it seldom waits at all; but a draft that cannot be served is an error of the start."""


class Leases(Protocol):
    """The draft workers that a group may use."""

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        """Lease a worker to the client with this identity, for rounds of at most `num_rows` requests.

        A client that leases the same worker again goes on with its lease.

        Args:
            avoid: the names of workers that failed lately; they are leased only if there is no other.

        Raises TargetError if no worker has room now.
        """
        ...

    async def kill(self, lease: Lease) -> bool:
        """Kill the worker of a lease, as a fault would; return whether there is one."""
        ...


class OwnDraft:
    """The leases of a group that has one draft worker to itself, which is started again whenever it ends."""

    def __init__(self, start: Callable[[], Coroutine[None, None, WorkerSet]], hang_timeout_s: float) -> None:
        """Make the leases of a worker that does not run; `start` starts it, or raises TargetError or ModelError."""
        self.workers: WorkerSet | None = None
        self._start, self._hang_timeout_s = start, hang_timeout_s
        self._has_started = asyncio.Event()

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        """Wait until the worker has started, and lease it; see `Leases`."""
        await self._has_started.wait()
        assert self.workers is not None
        lease: Lease
        [lease] = await results([self.workers.actors[0].lease.remote(identity, num_rows)])
        return lease

    async def kill(self, lease: Lease) -> bool:
        """Kill the worker; see `Leases`."""
        if self.workers is not None:
            self.workers.actors[0].kill.remote()
        return self.workers is not None

    async def keep(self, start: asyncio.Task[WorkerSet]) -> None:
        """Wait for a start of the worker, and start it again whenever that failed or the worker ends; never return."""
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                self.workers = await start
            except (TargetError, ModelError) as error:
                logger.warning("Draft worker did not start, next try in %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_START_RETRY_S)
            else:
                self._has_started.set()
                reason = await self.workers.wait_for_end(self._hang_timeout_s)
                self._has_started.clear()
                logger.warning("Draft worker lost, decoding without drafts: %s", reason)
                self.workers.kill()
                self.workers, pause_s = None, _FIRST_RETRY_S
                await asyncio.sleep(pause_s)
            start = asyncio.create_task(self._start())


async def wait_for_draft(start: asyncio.Task[WorkerSet], target: asyncio.Task[None]) -> None:
    """Wait until a draft worker has started or died, a little longer than for the target; raise its own error."""
    await asyncio.wait({start, target}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({start}, timeout=_GRACE_S)
    if not start.done():
        logger.warning("The draft worker is still starting; decoding without drafts until it has")
    elif not isinstance(start.exception(), WorkerDiedError):
        start.result()


async def keep_lease(
    leases: Leases, connector: Connector, drafter: RemoteDrafter, num_rows: int, taken: Callable[[Lease], None]
) -> None:
    """Have the drafter use a worker, and another one, if there is one, whenever that fails or is slow; never return.

    Meanwhile rounds go without drafts. A new worker lacks all prefixes, and so it is sent them with the next rows.

    Args:
        taken: called with every new lease.
    """
    failed, pause_s = set[str](), _FIRST_RETRY_S
    failures: asyncio.Queue[str] = asyncio.Queue()
    held: Lease | None = None
    link: Link | None = None
    try:
        while True:
            began, is_new = time.monotonic(), False
            try:
                lease = await leases.take(connector.identity, num_rows, failed)
            except TargetError as error:
                logger.warning("No draft worker leased, next try in %g s: %s", pause_s, error)
                failed = set()  # a worker that was slow or lost is better than none
            else:
                if link is None or lease != held:
                    if link is not None:
                        link.close()
                    link = connector.connect(lease.endpoint, version=lease.version, on_break=failures.put_nowait)
                    held = lease
                    taken(lease)
                reason = await _use(link, drafter, failures)
                logger.warning("Draft worker %s failed, decoding without drafts: %s", lease.worker, reason)
                if time.monotonic() - began > _AVOIDED_S:
                    failed, pause_s = set(), _FIRST_RETRY_S
                is_new = lease.worker not in failed
                failed = failed | {lease.worker}
            if not is_new:  # the longer no worker lasts, the less often they are asked
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
    finally:
        drafter.disconnect()
        if link is not None:
            link.close()


async def _use(link: Link, drafter: RemoteDrafter, failures: asyncio.Queue[str]) -> str:
    """Draft with a leased worker, once it replies to a ping, until it fails; return the reason."""
    while not failures.empty():
        failures.get_nowait()
    try:
        while await drafter.replies(link):
            drafter.connect(link, failures.put_nowait)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PING_PERIOD_S):
                    return await failures.get()
        return "it did not answer a ping"
    finally:
        drafter.disconnect()
