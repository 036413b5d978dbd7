"""plan_moves: which waiting requests an Ingress moves to another Router, by the Routers' reports.

Requests leave stopped Routers, and long queues for much shorter queues. Each plan moves at most half of the difference
between two queues, so queues of about the same length stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMALLEST_DIFFERENCE = 4  # sequences by which two queues must differ


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue of one Router.

    `movable` maps requests of this Ingress, newest first, to their sequences; `share` is its fraction of the queue.
    """

    depth: int
    movable: Mapping[str, int]
    share: float = 1.0
    is_stopped: bool = False  # it accepts no more requests
    can_serve: bool = True


def plan_moves(queues: Sequence[Queue], capacity: int) -> list[str]:
    """Return this Ingress's share of the requests to move; a Router holds at most `capacity` sequences."""
    depths = [queue.depth for queue in queues if queue.can_serve and not queue.is_stopped]
    if not depths:
        return []
    shallowest = min(depths)
    room = sum(max(0, capacity - depth) for depth in depths)
    moves: list[str] = []
    for queue in queues:
        if queue.is_stopped and queue.depth > shallowest:
            leaving = _newest(queue, room)
            room -= sum(queue.movable[request_id] for request_id in leaving)
            moves += leaving
    deepest = max(
        (queue for queue in queues if queue.movable and not queue.is_stopped),
        key=lambda queue: queue.depth,
        default=None,
    )
    if deepest is not None and (difference := deepest.depth - shallowest) >= SMALLEST_DIFFERENCE:
        moves += _newest(deepest, max(1, int(difference // 2 * deepest.share)))
    return moves


def _newest(queue: Queue, limit: int) -> list[str]:
    """Return the newest movable requests with at most `limit` sequences together."""
    chosen = []
    for request_id, num_sequences in queue.movable.items():
        if num_sequences <= limit:
            limit -= num_sequences
            chosen.append(request_id)
    return chosen
