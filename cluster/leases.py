"""Leases: how a group uses a draft worker, its own or a pool's."""

import asyncio
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
"""After a lease that lasted so long, workers that failed earlier are leased again."""
_PING_PERIOD_S = 1.0
_GRACE_S = 5.0
"""How long a started target waits for its draft to load: a draft that cannot be served must fail the start."""


class Leases(Protocol):
    """The draft workers that a group may use."""

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        """Lease a worker for rounds of up to `num_rows` requests, or go on with the client's lease of that worker.

        Workers that `avoid` names are leased only if there is no other. Raises TargetError if no worker has room.
        """
        ...

    async def kill(self, lease: Lease) -> bool:
        """Kill the worker of a lease, as a fault would; return False if it is gone already."""
        ...


class OwnDraft:
    """The lease of a draft worker that serves one group, and is started again whenever it ends."""

    def __init__(self, start: Callable[[], Coroutine[None, None, WorkerSet]], hang_timeout_s: float) -> None:
        self.workers: WorkerSet | None = None
        self._start, self._hang_timeout_s = start, hang_timeout_s
        self._has_started = asyncio.Event()

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        await self._has_started.wait()
        assert self.workers is not None
        lease: Lease
        [lease] = await results([self.workers.actors[0].lease.remote(identity, num_rows)])
        return lease

    async def kill(self, lease: Lease) -> bool:
        if self.workers is not None:
            self.workers.actors[0].kill.remote()
        return self.workers is not None

    async def keep(self, start: asyncio.Task[WorkerSet]) -> None:
        """Wait for `start`; start the worker again whenever a start fails or the worker ends. Never returns."""
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
    """Wait for the draft worker, at most `_GRACE_S` longer than the target; raise its error unless it was killed."""
    await asyncio.wait({start, target}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({start}, timeout=_GRACE_S)
    if not start.done():
        logger.warning("The draft worker is still starting; decoding without drafts until it has")
    elif not isinstance(start.exception(), WorkerDiedError):
        start.result()


async def keep_lease(
    leases: Leases, connector: Connector, drafter: RemoteDrafter, num_rows: int, taken: Callable[[Lease], None]
) -> None:
    """Lease a worker for the drafter, and another whenever the worker fails or is slow. Never returns.

    Rounds go without drafts meanwhile. `taken` is called with every new lease.
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
            if not is_new:  # ask less often the longer no worker lasts
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
    finally:
        drafter.disconnect()
        if link is not None:
            link.close()


async def _use(link: Link, drafter: RemoteDrafter, failures: asyncio.Queue[str]) -> str:
    """Draft with a worker, once it replies to a ping, until it fails; return why."""
    while not failures.empty():
        failures.get_nowait()
    failure = asyncio.create_task(failures.get())
    try:
        while True:
            # A round that failed is not kept waiting for the reply to a ping.
            ping = asyncio.create_task(drafter.replies(link))
            await asyncio.wait({ping, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                ping.cancel()
                return failure.result()
            if not ping.result():
                return "it did not answer a ping"
            drafter.connect(link, failures.put_nowait)
            await asyncio.wait({failure}, timeout=_PING_PERIOD_S)
            if failure.done():
                return failure.result()
    finally:
        failure.cancel()
        drafter.disconnect()
