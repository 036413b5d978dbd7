"""Leases: a group's use of one worker of the draft pool, in place of a draft worker of its own."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from cluster.transport import Endpoint
from engine.config import ModelInfo


@dataclass(frozen=True, slots=True)
class Lease:
    """A Router's use of one draft worker of the pool; it ends when the Router has been silent for a while.

    Attributes:
        worker: the id of the worker's process.
        version: of this lease; the worker ignores messages of another.
    """

    worker: str
    version: int
    endpoint: Endpoint
    info: ModelInfo


class Leases(Protocol):
    """The draft pool, as a group sees it."""

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        """Lease a worker to the client with this identity, for rounds of at most `num_rows` requests.

        Args:
            avoid: the ids of workers that failed lately; they are leased only if there is no other.

        Raises TargetError if no worker has room now.
        """
        ...
