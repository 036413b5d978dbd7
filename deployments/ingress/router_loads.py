"""RouterLoads: how full the Routers are, by what they report and by what this Ingress has sent them meanwhile.

Reports come every tenth of a second. In between, the requests of this Ingress are counted one by one; those of other
Ingress replicas are as the Routers last reported them.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from deployments.router.drain_rate import retry_after_s
from deployments.router.load import HEARTBEAT_S, Load

BELIEVED_S = 3 * HEARTBEAT_S
"""How old a report may be. After that nothing is known of the Router but what this Ingress has sent it."""
UNKNOWN_DRAIN_RATE = 1.0


class RouterLoads:
    """The Routers that run, their last reports, and the requests that this Ingress has there.

    All numbers of requests count each choice of a request by itself, as Routers do. By default Serve chooses Routers on
    a thread of its own, so requests are counted under a lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.routers: frozenset[str] = frozenset()
        self._clock = clock
        self._reports: dict[str, tuple[float, Load]] = {}
        self._requests: dict[str, tuple[int, str | None]] = {}
        self._sent: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def set_routers(self, routers: Iterable[str]) -> None:
        """Take the Routers that requests can be sent to now; the others are forgotten."""
        self.routers = frozenset(routers)
        self._reports = {name: report for name, report in list(self._reports.items()) if name in self.routers}

    def report(self, load: Load) -> None:
        """Take a Router's report."""
        self._reports[load.router] = self._clock(), load

    def begin(self, request_id: str, num_sequences: int) -> None:
        """Count a request that will be sent to a Router."""
        with self._lock:
            self._requests[request_id] = num_sequences, None
            self._sent[None] += num_sequences

    def assign(self, request_id: str, router: str) -> None:
        """Count a request at the Router that it is sent to, unless it has ended."""
        with self._lock:
            if request_id in self._requests:
                num_sequences, before = self._requests[request_id]
                self._requests[request_id] = num_sequences, router
                self._sent[before] -= num_sequences
                self._sent[router] += num_sequences

    def end(self, request_id: str) -> None:
        """Forget a request."""
        with self._lock:
            num_sequences, router = self._requests.pop(request_id)
            self._sent[router] -= num_sequences
            if not self._sent[router]:
                del self._sent[router]

    def depth(self, router: str) -> int:
        """Return how many requests a Router has, waiting and running."""
        load = self._believed(router)
        others = 0 if load is None else max(0, load.num_requests - load.num_yours)
        return others + self._sent[router]

    def ranked(self, routers: Sequence[str]) -> list[str]:
        """Return two of these Routers, chosen at random, the one with fewer requests first; or the only one."""
        return sorted(random.sample(routers, min(2, len(routers))), key=self.depth)

    def leaving(self) -> list[tuple[int, tuple[str, ...]]]:
        """Return of each Router that takes no more requests how many it has, and which of this Ingress may leave it."""
        believed = {name: self._believed(name) for name in self._reports.keys() - self.routers}
        return [(self.depth(name), load.leaving) for name, load in believed.items() if load and load.leaving]

    def room(self, capacity: int) -> float:
        """Return how many more requests this Ingress may take.

        That is an equal share of the room that the Routers reported, less what was sent to them since. Only an Ingress
        that has sent a request to a Router has a share; as long as that is one, it has all of the room there is.

        Args:
            capacity: requests that one Router can hold.
        """
        loads = [load for router in self.routers if (load := self._believed(router))]
        # While there is none, requests wait for one to start again.
        total = capacity * max(1, len(self.routers))
        reported = sum(load.num_requests for load in loads)
        num_sent = self._sent[None] + sum(self._sent[router] for router in self.routers)
        num_new = num_sent - sum(load.num_yours for load in loads)
        num_ingresses = max((load.num_ingresses for load in loads), default=1)
        return (total - reported) / num_ingresses - num_new

    def retry_after_s(self) -> int:
        """Return after how many seconds the Routers have probably finished what they have now."""
        loads = {router: self._believed(router) for router in self.routers}
        per_s = sum(load.drain_rate if load else UNKNOWN_DRAIN_RATE for load in loads.values())
        num_requests = sum(map(self.depth, self.routers)) + self._sent[None]
        return retry_after_s(num_requests, per_s or UNKNOWN_DRAIN_RATE)

    def _believed(self, router: str) -> Load | None:
        reported_at, load = self._reports.get(router, (0.0, None))
        return load if self._clock() - reported_at < BELIEVED_S else None


LOADS = RouterLoads()
"""Of this process: Serve makes the request router from its class alone, so nothing else can be handed to it."""
