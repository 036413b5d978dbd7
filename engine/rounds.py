"""Rounds: an engine's rounds one after the other, or two in flight that alternate.

In alternation, the drafter drafts for one cohort while the target verifies the other. A cohort's round is a coroutine,
which is suspended once its rows are sent, and resumed once the other cohort's rows are sent. It runs within its caller,
not as a task, so that an error, a cancellation or a reset meets it at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import coroutine
from typing import Any

from engine.protocols import Verdict, VerifyRow

Verify = Callable[[list[VerifyRow]], Awaitable[list[Verdict]]]
Round = Coroutine[Any, Any, bool]

_SENT = object()


class Rounds:
    """Runs rounds, which are coroutines that `begin(verify, meanwhile)` returns."""

    def __init__(self, begin: Callable[[Verify, Callable[[], object]], Round]) -> None:
        self._begin = begin
        self._flight: Round | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether a round is suspended after its rows were sent."""
        return self._flight is not None

    async def run(self, verify: Verify, meanwhile: Callable[[], object], num_cohorts: int) -> bool:
        """Run a round, and return its result.

        In alternation, the other cohort's round begins before this round ends, and the next call ends it.
        """
        if self._flight is None and num_cohorts == 1:
            return await self._begin(verify, meanwhile)
        if self._flight is None:
            first = self._begin(_suspended(verify), meanwhile)
            if (result := await _advance(first)) is not None:
                return result
            self._flight = first
        else:
            meanwhile()
        flight, later = self._flight, None
        if num_cohorts > 1:
            later = self._begin(_suspended(verify), lambda: None)
            if await _advance(later) is not None:
                later = None
        self._flight = later
        return bool(await _advance(flight))

    def drop(self) -> None:
        """End the round in flight without its verdicts."""
        if self._flight is not None:
            self._flight.close()
            self._flight = None


def _suspended(verify: Verify) -> Verify:
    async def send(rows: list[VerifyRow]) -> list[Verdict]:
        verdicts = asyncio.ensure_future(verify(rows))
        try:
            await _pause()
        except GeneratorExit:
            # The round is dropped; without this, asyncio would log its unread error.
            verdicts.add_done_callback(lambda done: done.cancelled() or done.exception())
            verdicts.cancel()
            raise
        return await verdicts

    return send


@coroutine
def _pause() -> Generator[object, None, None]:
    yield _SENT


@coroutine
def _advance(flight: Round) -> Generator[Any, Any, bool | None]:
    """Run a round up to its pause, and return None; or to its end, and return its result."""
    try:
        awaited = flight.send(None)
        while awaited is not _SENT:
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - the round gets it
                awaited = flight.throw(error)
            else:
                awaited = flight.send(None)
    except StopIteration as stop:
        result: bool = stop.value
        return result
    return None
