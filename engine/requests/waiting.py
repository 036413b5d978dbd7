"""WaitingQueue: which waiting request starts next, whether a new request may wait, and which requests are preempted.

Preempted requests start first, then requests that another engine began. Next comes the owner with the fewest tokens
served; it starts its request with the lowest `priority`, and the oldest of equal priority. A request of positive
priority also starts after other owners' requests. A negative priority counts among the owner's requests only.

Tokens are counted by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI '24): an
owner's counter grows by its computed prompt tokens and committed output tokens. An idle owner saves nothing up: when it
queues a request again, its counter is raised to the lowest counter of the waiting owners. If no owner waits, it is
raised to the counter of the owner that left the queue last.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain

from engine.errors import QueueFullError
from engine.requests.sequence import Sequence


class WaitingQueue:
    """The waiting requests of one engine.

    When `limit` requests wait, an owner may queue requests up to its equal share of the limit among the owners that
    wait. At most twice the limit can wait.
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
        return chain(self._begun, *self._new.values())

    @property
    def first(self) -> Sequence:
        """The request that starts next; the queue must not be empty."""
        if self._begun:
            return self._begun[0]
        firsts = (queue[0] for queue in self._new.values())
        return min(firsts, key=lambda first: (max(0, first.priority), self._served[first.owner]))

    def first_besides(self, owners: Container[str]) -> Sequence | None:
        """Return the next request whose owner is not in `owners` and whose priority is not positive, if any."""
        begun = (sequence for sequence in self._begun if sequence.owner not in owners and sequence.priority <= 0)
        firsts = [queue[0] for owner, queue in self._new.items() if owner not in owners and queue[0].priority <= 0]
        return next(begun, None) or min(firsts, key=lambda first: self._served[first.owner], default=None)

    def add(self, sequence: Sequence) -> None:
        """Queue a request; a request that another engine began always finds a place.

        Raises:
            QueueFullError: the queue is full, and the owner has its share.
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
            lowest = min((self._served[name] for name in self._new), default=self._served[self._left_last])
            self._served[owner] = max(self._served[owner], lowest)
        insort(self._new.setdefault(owner, []), sequence, key=lambda waiting: waiting.priority)

    def put_back(self, sequence: Sequence) -> None:
        self._begun.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._begun:
            self._begun.remove(sequence)
            return
        self._left_last = sequence.owner
        self._new[sequence.owner].remove(sequence)
        if not self._new[sequence.owner]:
            del self._new[sequence.owner]

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        self._served[sequence.owner] += num_tokens


def by_share(running: Iterable[Sequence]) -> list[Sequence]:
    """Return running requests, given oldest first, with the last to be preempted first.

    An owner's requests are ranked by `priority`. The first-ranked requests of all owners come before all second-ranked
    requests, and so on; the oldest first within a rank. Requests of positive priority come last.
    """
    num_before: Counter[str] = Counter()
    places: dict[Sequence, tuple[int, int]] = {}
    running = list(running)
    for sequence in sorted(running, key=lambda sequence: sequence.priority):
        places[sequence] = max(0, sequence.priority), num_before[sequence.owner]
        num_before[sequence.owner] += 1
    return sorted(running, key=lambda sequence: places[sequence])


def dispensable(running: Iterable[Sequence]) -> list[Sequence]:
    """Return the requests that can be preempted for an owner with no running request; the last is preempted first.

    Each owner keeps its first request of `by_share`, unless its priority is positive. Requests in flight are kept, too.
    """
    order = by_share(running)
    kept = {sequence.owner: sequence for sequence in reversed(order) if sequence.priority <= 0}
    return [sequence for sequence in order if kept.get(sequence.owner) is not sequence and not sequence.is_in_flight]
