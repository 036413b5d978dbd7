"""Readiness: what the Routers last said of themselves, so that health checks need not wait for them.

Every Ingress asks all Routers once a second. Serve lists no Router that is starting or draining.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deployments.background import in_background
from deployments.router.state import RouterState

PERIOD_S = 1.0
MAX_AGE_S = 5.0
"""How long a Router that does not answer counts as what it said last."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A Router's state, and when it was told."""

    state: RouterState
    time: float

    @property
    def age_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.time


class Readiness:
    """The states of the Routers. Belongs to the event loop that made it, and asks for as long as that runs."""

    def __init__(self, ask: Callable[[], Awaitable[list[RouterState | Exception]]]) -> None:
        """Begin to ask.

        Args:
            ask: returns the state of each Router, or the exception that came instead; TimeoutError: no answer yet.
        """
        self._ask = ask
        self._heard: dict[str, Heard] = {}
        loss = "Routers are not asked for their states"
        self._task = in_background(self._watch(), name="asking Routers for their states", loss=loss)

    @property
    def routers(self) -> list[Heard]:
        """The Routers that have been heard of recently."""
        return [heard for heard in self._heard.values() if heard.age_s <= MAX_AGE_S]

    @property
    def problem(self) -> str | None:
        """Why no Router can take rounds now; None if one can."""
        problems = [heard.state.problem for heard in self.routers]
        if None in problems:
            return None
        return problems[0] if problems else "no Router is running"

    def note(self, answers: list[RouterState | Exception]) -> None:
        """Take the answers to one question; Routers that are not among them are gone, unless one is late."""
        now = time.monotonic()
        states = [answer for answer in answers if isinstance(answer, RouterState)]
        is_one_late = any(isinstance(answer, TimeoutError) for answer in answers)
        before = {heard.state.replica: heard for heard in self.routers} if is_one_late else {}
        self._heard = before | {state.replica: Heard(state, now) for state in states}

    async def _watch(self) -> None:
        while True:
            self.note(await self._ask())
            await asyncio.sleep(PERIOD_S)
