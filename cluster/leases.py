"""Leases: a group's use of one worker of the draft pool, in place of a draft worker of its own."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

from cluster.remote_drafter import RemoteDrafter
from cluster.transport import Connector
from cluster.workers.pool_worker import Lease
from engine.errors import TargetError

__all__ = ["Lease", "Leases", "keep_lease"]

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 4.0
_TAKE_S = 10.0
_AVOIDED_S = 30.0
"""Workers that failed are leased again, although there are others, after one that lasted so long."""
_PING_PERIOD_S = 1.0


class Leases(Protocol):
    """The draft pool, as a group sees it."""

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        """Lease a worker to the client with this identity, for rounds of at most `num_rows` requests.

        Args:
            avoid: the ids of workers that failed lately; they are leased only if there is no other.

        Raises TargetError if no worker has room now.
        """
        ...


async def keep_lease(
    leases: Leases, connector: Connector, drafter: RemoteDrafter, num_rows: int, taken: Callable[[Lease], None]
) -> None:
    """Have the drafter use a worker of the pool, and another one whenever that fails or is slow; never return.

    Meanwhile rounds go without drafts. A new worker lacks all prefixes, and so it is sent them with the next rows.

    Args:
        taken: called with every new lease.
    """
    failed, pause_s = set[str](), _FIRST_RETRY_S
    while True:
        began, is_new = time.monotonic(), False
        try:
            async with asyncio.timeout(_TAKE_S):
                lease = await leases.take(connector.identity, num_rows, failed)
        except (TargetError, TimeoutError) as error:
            logger.warning("No draft worker leased, next try in %g s: %s", pause_s, error or f"none in {_TAKE_S:g} s")
            failed = set()  # a worker that was slow or lost is better than none
        else:
            logger.info("Leased draft worker %s", lease.worker)
            taken(lease)
            reason = await _use(lease, connector, drafter)
            logger.warning("Draft worker %s given back, decoding without drafts: %s", lease.worker, reason)
            if time.monotonic() - began > _AVOIDED_S:
                failed, pause_s = set(), _FIRST_RETRY_S
            is_new = lease.worker not in failed
            failed = failed | {lease.worker}
        if not is_new:  # the longer no worker lasts, the less often they are asked
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)


async def _use(lease: Lease, connector: Connector, drafter: RemoteDrafter) -> str:
    """Draft with a leased worker until it fails, and return the reason."""
    failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def fail(reason: str) -> None:
        if not failure.done():
            failure.set_result(reason)

    link = connector.connect(lease.endpoint, version=lease.version, on_break=fail)
    try:
        drafter.connect(link, on_failure=fail)
        while not failure.done():
            await asyncio.wait([failure], timeout=_PING_PERIOD_S)
            if not failure.done() and not await drafter.replies():
                fail("it did not answer a ping")
        return failure.result()
    finally:
        drafter.disconnect("the lease has ended")
