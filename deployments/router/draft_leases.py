"""ServeLeases: how a Router leases a worker of the draft pool, whose replicas are asked by Serve's handle.

Serve would choose a replica by its queue, but calls here are short and a lease is long: so every replica is asked, and
the one with the fewest leases is taken.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cluster.leases import Lease
from deployments.routing.client import ask_all
from engine.config import ModelConfig
from engine.errors import TargetError


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker of the pool says of itself: its id, its leases, and the share of time in which it drafts."""

    worker: str
    num_leases: int
    utilisation: float


class ServeLeases:
    """The draft pool, as a Router sees it."""

    def __init__(self, drafts: Any, target: ModelConfig) -> None:
        """Take the handle of the pool's deployment, and the target that is drafted for, as the pool knows it."""
        self._drafts, self._target = drafts, target

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        """Lease the worker with the fewest leases; see `cluster.leases.Leases`."""
        offers = [offer for offer in await ask_all(self._drafts, "offer") if isinstance(offer, Offer)]
        reasons = ["no draft worker of the pool answers"]
        for offer in sorted(offers, key=lambda one: (one.worker in avoid, one.num_leases, one.utilisation)):
            answers = await ask_all(self._drafts, "lease", offer.worker, self._target, identity, num_rows)
            for answer in answers:
                if isinstance(answer, Lease):
                    return answer
            reasons += [str(answer) for answer in answers if answer is not None]
        raise TargetError(reasons[-1])

    async def kill(self, lease: Lease | None) -> bool:
        """Kill the worker of a lease; return whether there is one."""
        return lease is not None and True in await ask_all(self._drafts, "kill", lease.worker)
