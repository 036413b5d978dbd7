"""Admission: refuses requests that the Routers have no room for, before any work on them, and paces the others.

A request's owner is its API key's digest. While the queues are full, owners with fewer open requests than the mean may
still send some, so no key shuts out the others. Routers may refuse, too: reports on their queues are 0.1 s old.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.errors import ErrorKind
from engine.errors import QueueFullError

if TYPE_CHECKING:
    from deployments.routing.client import ServeRouters

GENERATING_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/audit"})
PREPARATION = "paceline.preparation"  # key of the ASGI scope
CALM_S = 0.001
"""A turn of the event loop that takes less time has nothing to do but begin requests."""
LONGEST_TURN_S = 0.01  # that a busy event loop may delay the first request that waits


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """A request that is being prepared; the owner is empty without API keys."""

    owner: str


class Admission:
    """The requests that one Ingress is preparing for the Routers."""

    def __init__(self, routers: "ServeRouters", clock: Callable[[], float] = time.monotonic) -> None:
        self._routers = routers
        self._clock = clock
        self._turn = asyncio.Lock()
        self._preparing: set[Preparation] = set()
        self._open: Counter[str] = Counter()

    def check(self, owner: str = "") -> None:
        """Raise QueueFullError without room; an owner with fewer open requests than the mean has twice the room."""
        is_below_mean = self._open[owner] * len(self._open | {owner: 1}) < self._open.total()
        if len(self._preparing) >= self._routers.room(2 if is_below_mean else 1):
            error = QueueFullError("the queue is full")
            error.retry_after_s = self._routers.retry_after_s()
            raise error

    @contextmanager
    def preparing(self, owner: str = "") -> Iterator[Preparation]:
        """Count a request as open until the block ends, and as unknown to Routers until `submitted`."""
        preparation = Preparation(owner)
        self._open[owner] += 1
        self._preparing.add(preparation)
        try:
            yield preparation
        finally:
            self.submitted(preparation)
            self._open -= Counter((owner,))  # which drops owners without requests

    def submitted(self, preparation: Preparation) -> None:
        self._preparing.discard(preparation)

    def is_preparing(self, preparation: Preparation | None) -> bool:
        """Return whether a request is being prepared and no Router counts it."""
        return preparation in self._preparing

    def count_refusal(self, kind: ErrorKind) -> None:
        self._routers.count_refusal(kind.code or kind.type)

    async def turn(self) -> None:
        """Wait until a request may begin, in turn, so that refusals and other routes need not wait."""
        async with self._turn:
            now = self._clock()
            latest = now + LONGEST_TURN_S
            before = -math.inf
            while now - before >= CALM_S and now < latest:
                before = now
                await asyncio.sleep(0)
                now = self._clock()
