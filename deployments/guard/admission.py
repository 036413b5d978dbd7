"""Admission: refuses requests that the Routers have no room for before anything is done for them, and paces the others.

The Routers have the last word: an Ingress knows how full they are from reports that are a tenth of a second old.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from engine.errors import QueueFullError

if TYPE_CHECKING:
    from deployments.routing.client import ServeRouters

GENERATING_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})

CALM_S = 0.001
"""A turn of the event loop that is shorter has nothing else to do but to begin requests."""
LONGEST_TURN_S = 0.01
"""How long the first request that waits is held up by a busy event loop."""


_end_preparation: ContextVar[Callable[[], None]] = ContextVar("end of preparation", default=lambda: None)


class Admission:
    """The requests that one Ingress is preparing for the Routers."""

    def __init__(self, routers: "ServeRouters", clock: Callable[[], float] = time.monotonic) -> None:
        self._routers = routers
        self._clock = clock
        self._turn = asyncio.Lock()
        self._preparing: set[object] = set()

    def check(self) -> None:
        """Raise QueueFullError, with the seconds until a retry can succeed, if there is no room for another request."""
        if len(self._preparing) >= self._routers.room():
            error = QueueFullError("the queue is full")
            error.retry_after_s = self._routers.retry_after_s()
            raise error

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request, which no Router knows yet, until the block ends or `submitted` is called."""
        preparation = object()
        self._preparing.add(preparation)
        end = partial(self._preparing.discard, preparation)
        token = _end_preparation.set(end)
        try:
            yield
        finally:
            _end_preparation.reset(token)
            end()

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
    _end_preparation.get()()
