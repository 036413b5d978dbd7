"""Mover: has requests that wait in a long queue sent to a Router that has less to do, such as one that has just come.

It asks the Routers only while a request of this Ingress waits. A request moves at most once within
`lasting_outputs.REST_S`, and each move at most halves the difference, so that queues about as long as each other stay.
A Router that Serve has stopped cannot be asked any more; it reports by itself which requests may leave it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.background import in_background
from deployments.router.generation import QueueReport
from deployments.router.waiting import SHORTEST_WAIT_S
from engine.errors import CapacityError

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

CHECK_PERIOD_S = 1.0
SMALLEST_DIFFERENCE = 4
"""Sequences by which two queues must differ before a request is moved."""


class Queues(Protocol):
    """What is asked of the Routers."""

    async def report_queues(self) -> list[QueueReport]:
        """Return how much each Router has to do.

        Raises:
            CapacityError: no Router answers.
        """
        ...

    def leave_stopped(self) -> int:
        """Take waiting requests of this Ingress from Routers that were stopped, if others can serve them.

        Returns:
            How many requests those were.
        """
        ...

    async def withdraw(self, router_id: str, limit: int) -> int:
        """Have a Router give back waiting sequences of this Ingress, at most so many; return how many.

        Raises:
            CapacityError: no Router answers.
        """
        ...


@dataclass(frozen=True, slots=True)
class Move:
    """A Router that should give back waiting sequences, and how many at most."""

    router_id: str
    limit: int


def plan_move(reports: Sequence[QueueReport]) -> Move | None:
    """Return from where this Ingress should take waiting sequences, or None if the queues are even enough.

    Several Ingresses plan at the same time, so each moves its share of what should be moved.
    """
    able = [report for report in reports if report.can_serve]
    full = [report for report in reports if report.num_movable_of_sender]
    if not able or not full:
        return None
    shallowest = min(able, key=lambda report: report.depth)
    deepest = max(full, key=lambda report: report.depth)
    difference = deepest.depth - shallowest.depth
    if difference < SMALLEST_DIFFERENCE:
        return None
    num_wanted = min(difference // 2, deepest.num_movable)
    return Move(deepest.router_id, max(1, num_wanted * deepest.num_movable_of_sender // deepest.num_movable))


def choose_leaving(stopped: Iterable[tuple[int, Sequence[str]]], depths: Sequence[int], capacity: int) -> list[str]:
    """Return which requests should leave Routers that were stopped: all that fit elsewhere, where less waits.

    Args:
        stopped: how many requests each of these Routers has, and those of this Ingress that wait.
        depths: how many requests the Routers have that run.
        capacity: requests that one Router can hold.
    """
    room = sum(max(0, capacity - depth) for depth in depths)
    leaving = [key for depth, waiting in stopped if depths and min(depths) < depth for key in waiting]
    return leaving[:room]


class Mover:
    """Moves the waiting requests of one Ingress for as long as that lives."""

    def __init__(self, queues: Queues, has_waiting: Callable[[float], bool]) -> None:
        """Start to look.

        Args:
            has_waiting: whether a request has waited for its first token for so many seconds.
        """
        self._queues = queues
        self._has_waiting = has_waiting
        loss = "waiting requests are not moved"
        self._task = in_background(self._run(), name="moving waiting requests", loss=loss)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            if not self._has_waiting(SHORTEST_WAIT_S):
                continue
            if num_moved := self._queues.leave_stopped():
                logger.info("%d waiting requests leave a Router that was stopped", num_moved)
            try:
                move = plan_move(await self._queues.report_queues())
                if move is not None:
                    num_moved = await self._queues.withdraw(move.router_id, move.limit)
                    logger.info("%d waiting sequences leave Router %s for another", num_moved, move.router_id)
            except CapacityError:
                continue  # the requests wait for a Router
