"""Admission: refuses requests that the Routers have no room for before anything is done for them, and paces the others.

The Routers have the last word: an Ingress knows how full they are from reports that are a tenth of a second old.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from engine.errors import QueueFullError

GENERATING_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})

CALM_S = 0.001
"""A turn of the event loop that is shorter has nothing else to do but to begin requests."""
LONGEST_TURN_S = 0.01
"""How long the first request that waits is held up by a busy event loop."""


class Room(Protocol):
    """What Routers can still take."""

    def room(self) -> float:
        """Return how many more requests this Ingress may send."""
        ...

    def retry_after_s(self) -> int:
        """Return after how many seconds clients that are refused should come again."""
        ...


class Preparation:
    """The time from a request's body to its submission, in which no Router knows of it yet."""

    current: ContextVar["Preparation | None"] = ContextVar("preparation", default=None)

    def __init__(self, admission: "Admission") -> None:
        self._admission: Admission | None = admission
        admission.num_preparing += 1

    def end(self) -> None:
        """Count the request no longer."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.num_preparing -= 1


class Admission:
    """The requests that one Ingress is preparing for the Routers."""

    def __init__(self, routers: Room, clock: Callable[[], float] = time.monotonic) -> None:
        self._routers = routers
        self._clock = clock
        self._turn = asyncio.Lock()
        self.num_preparing = 0

    def check(self) -> None:
        """Raise if the Routers have no room for one more request.

        Raises:
            QueueFullError: with the time after which they have.
        """
        if self.num_preparing >= self._routers.room():
            error = QueueFullError("the queue is full")
            error.retry_after_s = self._routers.retry_after_s()
            raise error

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request until the block ends or the request is submitted, whichever comes first."""
        preparation = Preparation(self)
        token = Preparation.current.set(preparation)
        try:
            yield
        finally:
            Preparation.current.reset(token)
            preparation.end()

    async def turn(self) -> None:
        """Wait until a request may be begun: one after the other, when the event loop has little else to do.

        So refusals and other routes do not wait behind many requests that came before them.
        """
        async with self._turn:
            now = self._clock()
            latest = now + LONGEST_TURN_S
            before = -math.inf
            while now - before >= CALM_S and now < latest:
                before = now
                await asyncio.sleep(0)
                now = self._clock()


def submitted() -> None:
    """Say that a Router counts the current request from now on."""
    preparation = Preparation.current.get()
    if preparation is not None:
        preparation.end()
