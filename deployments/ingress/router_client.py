"""The Ingress's client of the Routers: calls all replicas by Serve's handle, and raises errors as the Router did."""

import asyncio
import logging
import math
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.transport import Inbox
from deployments.ingress.admission import Room
from deployments.ingress.answer import Outputs
from deployments.ingress.arrivals import Arrivals, ServeOutputs, raised_error
from deployments.ingress.broadcast import ask_all
from deployments.ingress.counted_outputs import CountedOutputs
from deployments.ingress.draining import Draining
from deployments.ingress.lasting_outputs import LastingOutputs
from deployments.ingress.moving import Mover, choose_leaving
from deployments.ingress.router_loads import LOADS
from deployments.metrics import IngressMetrics, ReplicaMetrics
from deployments.ray_exporter import RayExporter
from deployments.router.generation import Description, Generation, QueueReport
from deployments.router.state import RouterState

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

RETRY_PAUSE_S = 1.0


class RouterHandle(Room, Protocol):
    """What the Ingress calls on Routers: `ServeRouters`, or a fake in tests."""

    def generate(self, request: Generation) -> Outputs:
        """Send a request to a Router; the first `next` raises its errors."""
        ...

    async def describe(self) -> Description:
        """Return what is served."""
        ...

    async def states(self) -> list[RouterState | Exception]:
        """Return the state of each Router, or the exception that came instead."""
        ...

    def collect_here(self) -> ReplicaMetrics:
        """Return the metrics of this Ingress."""
        ...

    async def collect(self) -> list[ReplicaMetrics]:
        """Return the metrics of every Ingress and every Router that answers."""
        ...

    async def base_url(self) -> str:
        """Return where clients reach this application."""
        ...


class ServeRouters:
    """Serve's handle to the Routers, and the inbox to which they send tokens."""

    def __init__(
        self,
        handle: Any,
        inbox: Inbox,
        arrivals: Arrivals,
        metrics: IngressMetrics,
        *,
        target: str | None = None,
    ) -> None:
        self._handle = handle
        self._capacity: int | None = None
        self._metrics = metrics
        context = serve.get_replica_context()
        self._replica = context.replica_tag
        self._ingresses = serve.get_deployment_handle(context.deployment, context.app_name)
        self._inbox = inbox
        self._arrivals = arrivals
        self._target_id = target
        # Not by reference: an object in Ray's store for every request would take longer. Serve then sends what is
        # yielded over its own connection between replicas.
        self._generate = handle.generate.options(stream=True, _by_reference=False)
        self._mover = Mover(self, arrivals.has_waiting)
        self._draining = Draining(arrivals.end)
        self._exporter = RayExporter(self.collect_here)

    @classmethod
    async def open(cls, handle: Any, host: str, model_name: str, *, target: str | None = None) -> "ServeRouters":
        """Open an inbox on this node's address.

        Args:
            target: `target_id` of the only target that may take requests; None is any. Routers of another one run
                until those that replace them are ready.
        """
        arrivals = Arrivals(LOADS)
        inbox = await Inbox.open(host, arrivals.deliver)
        return cls(handle, inbox, arrivals, IngressMetrics(model_name), target=target)

    def generate(self, request: Generation) -> Outputs:
        """Send a request to the replica that takes it, and to another one if that is lost."""
        request = replace(request, target_id=self._target_id)
        lasting = LastingOutputs(request, self._submit, self._metrics.observe_resubmission, self._has_other)
        return CountedOutputs(lasting, self._metrics)

    def _has_other(self, refusing: frozenset[str]) -> bool:
        return not LOADS.routers <= refusing

    def _submit(self, request: Generation) -> ServeOutputs:
        LOADS.begin(request.request_id, request.num_choices - len(request.finished))
        response = self._generate.remote(request, self._inbox.address)
        outputs = ServeOutputs(response, request.request_id, self._arrivals)
        outputs.on_end(partial(LOADS.end, request.request_id))
        return outputs

    def room(self) -> float:
        """Return how many more requests this Ingress may send; no limit until a Router has said what it holds."""
        return math.inf if self._capacity is None else LOADS.room(self._capacity)

    def retry_after_s(self) -> int:
        """Return after how many seconds clients that are refused should come again."""
        return LOADS.retry_after_s()

    async def describe(self) -> Description:
        """Return what is served, as soon as a replica serves it."""
        other: str | None = None
        while True:
            try:
                description: Description = await self._handle.describe.remote()
            except (RayActorError, DeploymentUnavailableError, asyncio.CancelledError) as error:
                logger.warning("no Router yet: %s", raised_error(error))
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                if self._target_id in (None, description.target_id):
                    self._capacity = description.capacity
                    return description
                if other != description.target_id:
                    other = description.target_id
                    logger.info("waiting for a Router of %s; %s is still served", self._target_id, other)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def report_queues(self) -> list[QueueReport]:
        """Return how much each replica has to do."""
        answers = await ask_all(self._handle, "report_queue", self._inbox.address)
        return [answer for answer in answers if isinstance(answer, QueueReport)]

    def leave_stopped(self) -> int:
        """Take waiting requests from Routers that Serve has stopped, if others can serve them; return how many."""
        if self._capacity is None:
            return 0
        depths = [LOADS.depth(router) for router in LOADS.routers]
        return self._arrivals.withdraw(choose_leaving(LOADS.leaving(), depths, self._capacity))

    async def withdraw(self, router_id: str, limit: int) -> int:
        """Have a replica give back waiting requests of this Ingress; return how many sequences they are."""
        answers = await ask_all(self._handle, "withdraw", router_id, self._inbox.address, limit)
        return sum(answer for answer in answers if isinstance(answer, int))

    async def states(self) -> list[RouterState | Exception]:
        """Return the state of each Router, or the exception that came instead."""
        return await ask_all(self._handle, "state")

    def collect_here(self) -> ReplicaMetrics:
        """Return the metrics of this Ingress."""
        return ReplicaMetrics(self._replica, self._metrics.collect())

    async def collect(self) -> list[ReplicaMetrics]:
        """Return the metrics of every Ingress and every Router that answers."""
        answers = await asyncio.gather(ask_all(self._ingresses, "collect"), ask_all(self._handle, "collect"))
        metrics = {answer.replica: answer for answer in chain(*answers) if isinstance(answer, ReplicaMetrics)}
        # Serve lists this replica only when it has started, and may not list it any more when it ends.
        return list({self._replica: self.collect_here(), **metrics}.values())

    async def base_url(self) -> str:
        """Return the URL at which Serve listens; only a private function of Serve returns it."""
        client = await asyncio.to_thread(_get_global_client)
        return "" if client is None else client.root_url
