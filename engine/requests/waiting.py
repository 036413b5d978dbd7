"""WaitingQueue: which waiting request starts next, whether another one may wait, and which running one makes room.

Requests that have begun come first: preempted ones, then those that another engine began. Of the others, the owner with
the fewest tokens served is next, and of its requests the one with the lowest `priority`, then the oldest. A positive
`priority` also lets other owners' requests pass; a negative one does not pass them, so that no owner can name itself
the first.

The tokens are virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI '24): an owner's
counter grows by the prompt tokens computed and the output tokens committed for it. An owner without waiting requests
saves nothing up: when it comes back, its counter is raised to the lowest one of the owners that wait, or to that of the
owner that left the queue last.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain

from engine.errors import QueueFullError
from engine.requests.sequence import Sequence


class WaitingQueue:
    """The waiting requests of one engine.

    While `limit` requests wait, an owner may add more up to its equal share of the limit among the owners that wait,
    itself included, rounded up; but never more than twice the limit wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun: deque[Sequence] = deque()
        self._new: dict[str, list[Sequence]] = {}
        self._served: Counter[str] = Counter()
        self._left_last = ""

    def __len__(self) -> int:
        return len(self._begun) + sum(map(len, self._new.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the requests that have begun, then those of each owner in their order."""
        return chain(self._begun, *self._new.values())

    @property
    def first(self) -> Sequence:
        """The request that starts next; there must be one."""
        if self._begun:
            return self._begun[0]
        heads = (queue[0] for queue in self._new.values())
        return min(heads, key=lambda head: (max(0, head.priority), self._served[head.owner]))

    def first_besides(self, owners: Container[str]) -> Sequence | None:
        """Return the request that starts next of those of other owners that let nobody pass; None if there is none."""
        begun = (sequence for sequence in self._begun if sequence.owner not in owners and sequence.priority <= 0)
        heads = [queue[0] for owner, queue in self._new.items() if owner not in owners and queue[0].priority <= 0]
        return next(begun, None) or min(heads, key=lambda head: self._served[head.owner], default=None)

    def add(self, sequence: Sequence) -> None:
        """Queue a request; one that another engine began always finds a place.

        Raises:
            QueueFullError: the queue is full, and the owner has its share of it.
        """
        if sequence.request.num_output_tokens:
            self._begun.append(sequence)
            return
        owner = sequence.owner
        if (num_waiting := len(self)) >= self._limit:
            places = Counter(waiting.owner for waiting in self)
            share = -(-self._limit // len(places | {owner: 1}))
            if places[owner] >= share or num_waiting >= 2 * self._limit:
                raise QueueFullError(f"{num_waiting} requests are waiting, the limit is {self._limit}")
        if owner not in self._new:
            lowest = min((self._served[other] for other in self._new), default=self._served[self._left_last])
            self._served[owner] = max(self._served[owner], lowest)
        insort(self._new.setdefault(owner, []), sequence, key=lambda waiting: waiting.priority)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a request that ran, before all others."""
        self._begun.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request that starts or is aborted."""
        if sequence in self._begun:
            self._begun.remove(sequence)
            return
        self._left_last = sequence.owner
        self._new[sequence.owner].remove(sequence)
        if not self._new[sequence.owner]:
            del self._new[sequence.owner]

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens that were computed for a request's owner."""
        self._served[sequence.owner] += num_tokens


def by_share(running: Iterable[Sequence]) -> list[Sequence]:
    """Return running requests, given oldest first, in the order in which they keep their places.

    All owners' first requests come before all second ones, and so on, then the oldest. An owner's requests are in the
    order of `priority`. Those with a positive one come after all others.
    """
    num_before: Counter[str] = Counter()
    places: dict[Sequence, tuple[int, int]] = {}
    running = list(running)
    for sequence in sorted(running, key=lambda sequence: sequence.priority):
        places[sequence] = max(0, sequence.priority), num_before[sequence.owner]
        num_before[sequence.owner] += 1
    return sorted(running, key=lambda sequence: places[sequence])


def dispensable(running: Iterable[Sequence]) -> list[Sequence]:
    """Return the requests, the first to be preempted last, that make room for an owner that has none running.

    Each owner keeps its first one, unless its `priority` is positive, and those in flight.
    """
    order = by_share(running)
    kept = {sequence.owner: sequence for sequence in reversed(order) if sequence.priority <= 0}
    return [sequence for sequence in order if kept.get(sequence.owner) is not sequence and not sequence.is_in_flight]
