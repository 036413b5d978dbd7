"""WaitingRequests: the requests of one Router that another one could take over without losing any work."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.router.generation import request_id_of
from deployments.router.stream import Stream

SHORTEST_WAIT_S = 1.0
"""How long a request waits before it may be withdrawn: most get their turn sooner than a second way would take."""


class Queue(Protocol):
    """What is asked of an engine."""

    @property
    def unstarted_ids(self) -> list[str]:
        """Sequences of which nothing has been computed yet, oldest first."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    stream: Stream
    sequence_ids: frozenset[str]
    sender: Any
    movable_from: float


class WaitingRequests:
    """The requests of one Router, and which of them may be withdrawn."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._requests: dict[str, _Request] = {}

    def add(self, stream: Stream, sequence_ids: Collection[str], sender: Any, rest_s: float) -> None:
        """Note a request, who sent it, and how long it must stay here at least."""
        movable_from = stream.started + max(rest_s, SHORTEST_WAIT_S)
        request = _Request(stream, frozenset(sequence_ids), sender, movable_from)
        self._requests |= dict.fromkeys(sequence_ids, request)

    def remove(self, sequence_ids: Collection[str]) -> None:
        """Forget a request that has ended."""
        for sequence_id in sequence_ids:
            self._requests.pop(sequence_id, None)

    def num_movable(self, sender: Any = None) -> int:
        """Return how many sequences may be withdrawn; only those of a sender, if one is given."""
        return sum(len(request.sequence_ids) for request in self._movable() if sender in (None, request.sender))

    def movable_ids(self, sender: Any) -> list[str]:
        """Return the requests of a sender that may be withdrawn, the newest first."""
        return [request_id_of(min(request.sequence_ids)) for request in self._movable() if request.sender == sender]

    def choose(self, sender: Any, limit: int) -> list[tuple[Stream, frozenset[str]]]:
        """Return whole requests of a sender with up to so many sequences together, the newest first."""
        chosen = []
        for request in self._movable():
            if request.sender == sender and len(request.sequence_ids) <= limit:
                limit -= len(request.sequence_ids)
                chosen.append((request.stream, request.sequence_ids))
        return chosen

    def _movable(self) -> Iterator[_Request]:
        """Yield the requests that may be withdrawn, the newest first."""
        unstarted = self._queue.unstarted_ids
        now, waiting = time.monotonic(), frozenset(unstarted)
        newest_first = dict.fromkeys(self._requests[key] for key in reversed(unstarted) if key in self._requests)
        for request in newest_first:
            if request.sequence_ids <= waiting and request.movable_from <= now:
                yield request
