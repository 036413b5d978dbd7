"""The simulated cluster: arrivals, groups, cold starts and losses in virtual time, scaled by the service's own policy.

The policy and Serve's delays are the code that the service runs; only the clock is not real.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray.serve.autoscaling_policy import _apply_delay_logic

from deployments.autoscaling import IS_RECOVERING, NUM_REQUESTS, QueueDepthPolicy, autoscaling_config
from deployments.config import Autoscaling
from tests.bench.arrivals import Arrival
from tests.bench.group_model import GroupCosts, GroupModel, Job

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig

TICK_S = 0.5
"""Between two decisions; also how old the numbers are that they are made from."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and what happens to it."""

    costs: GroupCosts
    scaling: Autoscaling
    start_s: float = 60.0
    """From a decision until a new group takes requests."""
    losses_per_group_hour: float = 0.0
    """How often a group loses its node. It starts again elsewhere, and its requests go to the others."""
    num_initial: int | None = None
    """Groups that serve at the start; None is the smallest number."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of a scenario."""

    jobs: list[Job] = field(default_factory=list)
    num_rejected: int = 0
    num_losses: int = 0
    group_hours: float = 0.0
    targets: list[tuple[float, int]] = field(default_factory=list)
    """Decisions: when, and how many groups from then on."""

    def wait_s(self, part: float) -> float:
        """Return the time from arrival until a group begins, which this part of the requests did not exceed."""
        return _quantile([job.started_s - job.arrival.time_s for job in self.jobs if job.started_s is not None], part)

    def first_token_s(self, part: float) -> float:
        """Return the time to the first token that this part of the requests did not exceed."""
        times = [job.first_token_s - job.arrival.time_s for job in self.jobs if job.first_token_s is not None]
        return _quantile(times, part)


@dataclass(slots=True, eq=False)
class Replica:
    """One group of the cluster from its start to its end."""

    number: int
    model: GroupModel
    created_s: float
    ready_s: float
    is_draining: bool = False
    version: int = 0
    """Counts changes; an event that was planned before the latest one is void."""


class Cluster:
    """Runs arrivals through a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._chance = random.Random(scenario.seed)
        self._policy = QueueDepthPolicy(scenario.scaling.requests_per_replica)
        self._delays: AutoscalingConfig | None = autoscaling_config(scenario.scaling)
        self._delay_state: dict[str, Any] = {}
        self._target = scenario.num_initial or scenario.scaling.min_replicas
        self._replicas: list[Replica] = []
        self._serving: list[Replica] = []
        self._num_requests = 0
        self._num_unfinished = 0
        self._homeless: deque[Job] = deque()
        self._events: list[tuple[float, int, Replica, int]] = []
        self._numbers = itertools.count()
        self._now_s = 0.0
        self._depth_s = 0.0
        self._depths: deque[float] = deque([0.0] * 4, maxlen=4)
        self.outcome = Outcome()

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Return what came of the arrivals, after the last one has finished."""
        for _ in range(self._target):
            self._start(delay_s=0.0)
        coming = deque(arrivals)
        tick_s, self._num_unfinished = TICK_S, len(arrivals)
        while self._num_unfinished:
            event_s = self._events[0][0] if self._events else math.inf
            arrival_s = coming[0].time_s if coming else math.inf
            next_s = min(event_s, arrival_s, tick_s)
            self._depth_s += self._num_requests * (next_s - self._now_s)
            self._now_s = next_s
            if next_s == arrival_s:
                self._place(Job.of(coming.popleft()))
            elif next_s == event_s:
                self._advance()
            else:
                self._tick()
                tick_s += TICK_S
        for replica in self._replicas:
            self._end(replica)
        return self.outcome

    def _count(self) -> None:
        """Find the groups that take requests, and how many requests run and wait on them."""
        self._serving = [
            replica for replica in self._replicas if replica.ready_s <= self._now_s and not replica.is_draining
        ]
        self._num_requests = sum(replica.model.num_requests for replica in self._serving)

    def _place(self, job: Job) -> None:
        """Give a request to the less loaded of two groups, which refuses it if its queue is full."""
        if not self._serving:
            self._homeless.append(job)
            return
        pair = self._chance.sample(self._serving, min(2, len(self._serving)))
        replica = min(pair, key=lambda replica: replica.model.num_requests)
        if replica.model.is_full and job.num_losses == 0:
            self.outcome.num_rejected += 1
            self._num_unfinished -= 1
            return
        if job.num_losses == 0:
            self.outcome.jobs.append(job)
        self._catch_up(replica)
        replica.model.add(job)
        self._num_requests += 1
        self._plan(replica)

    def _advance(self) -> None:
        """Take the next event of a group."""
        _, _, replica, version = heapq.heappop(self._events)
        if version != replica.version:
            return
        self._catch_up(replica)
        if replica.ready_s == self._now_s:
            self._count()
            homeless, self._homeless = self._homeless, deque()
            for job in homeless:
                self._place(job)
        self._plan(replica)
        if replica.is_draining and not replica.model.num_requests:
            self._end(replica)
            self._replicas.remove(replica)

    def _catch_up(self, replica: Replica) -> None:
        """Have a group work until now."""
        num_finished = len(replica.model.advance(self._now_s))
        self._num_unfinished -= num_finished
        if not replica.is_draining:
            self._num_requests -= num_finished

    def _plan(self, replica: Replica) -> None:
        """Plan the group's next event, in place of the one planned before."""
        replica.version += 1
        event_s = max(replica.model.next_event_s(), replica.ready_s)
        if event_s < math.inf:
            heapq.heappush(self._events, (event_s, next(self._numbers), replica, replica.version))

    def _tick(self) -> None:
        self._lose_some()
        if self._delays is None:
            return
        self._depths.append(self._depth_s)
        mean = (self._depths[-2] - self._depths[-4]) / (2 * TICK_S)
        context: Any = SimpleNamespace(
            aggregated_metrics={NUM_REQUESTS: {"all": mean}, IS_RECOVERING: {}} if self._serving else {},
            total_queued_requests=len(self._homeless),
            target_num_replicas=self._target,
        )
        desired, _ = self._policy(context)
        target, self._delay_state = _apply_delay_logic(
            desired, self._target, self._delays, self._delay_state, _now=self._now_s
        )
        target = min(max(target, self._delays.min_replicas), self._delays.max_replicas)
        if target != self._target:
            self._target = target
            self.outcome.targets.append((self._now_s, target))
            self._scale()

    def _scale(self) -> None:
        """Start groups, or let the newest ones go, first those that do not serve yet."""
        active = [replica for replica in self._replicas if not replica.is_draining]
        for _ in range(self._target - len(active)):
            self._start(delay_s=self._scenario.start_s)
        for replica in sorted(active, key=lambda replica: replica.ready_s)[self._target :]:
            replica.is_draining = True
            if not replica.model.num_requests:
                self._end(replica)
                self._replicas.remove(replica)
        self._count()

    def _start(self, *, delay_s: float) -> None:
        model = GroupModel(self._scenario.costs, now_s=self._now_s + delay_s)
        replica = Replica(next(self._numbers), model, self._now_s, self._now_s + delay_s)
        self._replicas.append(replica)
        heapq.heappush(self._events, (replica.ready_s, next(self._numbers), replica, replica.version))

    def _end(self, replica: Replica) -> None:
        replica.version += 1
        self.outcome.group_hours += (self._now_s - replica.created_s) / 3600

    def _lose_some(self) -> None:
        chance = self._scenario.losses_per_group_hour * TICK_S / 3600
        for replica in [replica for replica in self._serving if self._chance.random() < chance]:
            self.outcome.num_losses += 1
            self._catch_up(replica)
            self._end(replica)
            self._replicas.remove(replica)
            self._start(delay_s=self._scenario.start_s)
            self._count()
            for job in replica.model.lose():
                self._place(job)


def simulate(scenario: Scenario, arrivals: Sequence[Arrival]) -> Outcome:
    """Return what comes of these arrivals in this scenario."""
    return Cluster(scenario).run(arrivals)


def fixed(scenario: Scenario, num_groups: int) -> Scenario:
    """Return the scenario with a fixed number of groups."""
    return replace(scenario, scaling=Autoscaling(min_replicas=num_groups), num_initial=None)


def _quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0
