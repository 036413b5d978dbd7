"""RouterLoads: each Router's load, from its last report and this Ingress's requests since, and the ranking by it."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deployments.routing.moving import Queue
from deployments.routing.prefixes import PrefixHolders
from deployments.wire import HEARTBEAT_S, Report, retry_after_s

BELIEVED_S = 5 * HEARTBEAT_S
"""How old a report may be; without a newer report, only this Ingress's requests count as a Router's load."""
UNKNOWN_DRAIN_RATE = 1.0
TOKENS_PER_PLACE = 16
"""Tokens of a prefix for which a Router is chosen although its queue is one sequence longer than the shortest."""
LEAST_PLACES, PLACES_PER_DEPTH = 6, 0.25
"""For a prefix, a queue may be longer than the shortest by 6 sequences, or by a quarter if that is more."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A Router's report and its age in seconds."""

    report: Report
    age_s: float


def problem_of(routers: Sequence[Heard]) -> str | None:
    """Return why none of these Routers can take rounds now; None if any can."""
    problems = [heard.report.problem for heard in routers]
    if None in problems:
        return None
    return problems[0] if problems else "no Router is running"


class RouterLoads:
    """The running Routers, their reports, and this Ingress's sequences there; locked, as Serve chooses in a thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.routers: frozenset[str] = frozenset()
        self._clock = clock
        self._reports: dict[str, tuple[float, Report]] = {}
        self._requests: dict[str, tuple[int, str | None]] = {}
        self._sent: Counter[str | None] = Counter()
        self._lock = threading.Lock()
        self._prefixes = PrefixHolders()

    def set_routers(self, routers: Iterable[str]) -> None:
        """Set the available Routers; forget the others."""
        self.routers = frozenset(routers)
        self._reports = {name: report for name, report in list(self._reports.items()) if name in self.routers}

    def note(self, report: Report) -> None:
        self._reports[report.router] = self._clock(), report
        self._prefixes.note(report.prefixes, report.router, self.routers)

    @property
    def heard(self) -> list[Heard]:
        return [heard for router in sorted(self.routers) if (heard := self._heard_of(router))]

    @property
    def is_one_silent(self) -> bool:
        """Whether an available Router has not reported."""
        return len(self.heard) < len(self.routers)

    def begin(self, request_id: str, num_sequences: int) -> None:
        with self._lock:
            self._requests[request_id] = num_sequences, None
            self._sent[None] += num_sequences

    def assign(self, request_id: str, router: str) -> None:
        """Count a request at its Router, unless it has ended."""
        with self._lock:
            if request_id in self._requests:
                num_sequences, before = self._requests[request_id]
                self._requests[request_id] = num_sequences, router
                self._sent[before] -= num_sequences
                self._sent[router] += num_sequences

    def end(self, request_id: str) -> None:
        with self._lock:
            num_sequences, router = self._requests.pop(request_id)
            self._sent[router] -= num_sequences
            if not self._sent[router]:
                del self._sent[router]

    def depth(self, router: str) -> int:
        heard = self._heard_of(router)
        # Both numbers of this Ingress's requests include finished choices.
        from_others = 0 if heard is None else heard.report.num_requests - heard.report.num_yours
        return max(0, from_others + self._sent[router])

    def ranked(self, routers: Sequence[str], prefixes: Sequence[int] = ()) -> list[str]:
        """Return two of these Routers, the better first; or the only Router.

        A Router that holds a long prefix is first unless its queue is long; else the shorter of two random queues is.
        """
        ranked = sorted(random.sample(routers, min(2, len(routers))), key=self.depth)
        depths = {router: self.depth(router) for router in routers}
        shortest = min(depths.values(), default=0)
        most_places = max(LEAST_PLACES, shortest * PLACES_PER_DEPTH)
        for num_tokens, holders in self._prefixes.known(prefixes):
            longest = shortest + min(num_tokens // TOKENS_PER_PLACE, most_places)
            near = [router for router in routers if router in holders and depths[router] <= longest]
            if near:
                best = min(near, key=depths.__getitem__)
                return [best, *(router for router in ranked if router != best)][:2]
        return ranked

    def queues(self, is_movable: Callable[[str], bool]) -> list[Queue]:
        """Return the queue of each Router that reports, stopped or not; `is_movable` tells which requests may move."""
        heard = [heard for router in [*self._reports] if (heard := self._heard_of(router))]
        return [self._queue(entry.report, filter(is_movable, entry.report.movable)) for entry in heard]

    def _queue(self, report: Report, request_ids: Iterable[str]) -> Queue:
        movable = {
            request_id: self._requests[request_id][0] for request_id in request_ids if request_id in self._requests
        }
        share = min(1.0, report.num_yours / max(1, report.num_requests))
        is_stopped = report.router not in self.routers
        return Queue(self.depth(report.router), movable, share, is_stopped, report.problem is None)

    def room(self, capacity: int) -> float:
        """Return how many requests this Ingress may still send, if a Router holds `capacity`.

        The Ingresses that have sent requests share the reported room equally; requests since the report are subtracted.
        """
        reports = [heard.report for heard in self.heard]
        # While there is no Router, requests wait until a Router has started.
        total = capacity * max(1, len(self.routers))
        reported = sum(report.num_requests for report in reports)
        num_sent = self._sent[None] + sum(self._sent[router] for router in self.routers)
        num_new = num_sent - sum(report.num_yours for report in reports)
        num_ingresses = max((report.num_ingresses for report in reports), default=1)
        return (total - reported) / max(1, num_ingresses) - num_new

    def retry_after_s(self) -> int:
        """Return the seconds after which the Routers have probably finished their present requests."""
        heard = self.heard
        per_s = sum(entry.report.drain_rate for entry in heard)
        per_s += UNKNOWN_DRAIN_RATE * (len(self.routers) - len(heard))
        num_requests = sum(map(self.depth, self.routers)) + self._sent[None]
        return retry_after_s(num_requests, per_s or UNKNOWN_DRAIN_RATE)

    def _heard_of(self, router: str) -> Heard | None:
        noted_s, report = self._reports.get(router, (0.0, None))
        age_s = self._clock() - noted_s
        return None if report is None or age_s >= BELIEVED_S else Heard(report, age_s)


LOADS = RouterLoads()
"""This process's loads. Serve pickles `choice.QueueDepthRouter` with copies of its module's names, but of no module."""
