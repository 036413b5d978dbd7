"""The Ingress's client of the Routers: calls all replicas by Serve's handle, and raises errors as the Router did."""

import asyncio
import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from prometheus_client import Metric
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.transport import Inbox
from deployments.ingress.admission import Room
from deployments.ingress.answer import Outputs
from deployments.ingress.arrivals import Arrivals, ServeOutputs, raised_error
from deployments.ingress.draining import Draining
from deployments.ingress.lasting_outputs import LastingOutputs
from deployments.ingress.moving import Mover
from deployments.ingress.router_loads import LOADS
from deployments.metrics import IngressMetrics
from deployments.router.generation import Description, Generation, QueueReport
from engine.errors import CapacityError

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

ANSWER_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 1.0


class RouterHandle(Room, Protocol):
    """What the Ingress calls on Routers: `ServeRouters`, or a fake in tests."""

    def generate(self, request: Generation) -> Outputs:
        """Send a request to a Router; the first `next` raises its errors."""
        ...

    async def describe(self) -> Description:
        """Return what is served."""
        ...

    async def collect(self) -> list[list[Metric]]:
        """Return the metrics of the client, and of every replica."""
        ...

    async def check_progress(self) -> None:
        """Raise unless rounds are being finished while there is work."""
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
        num_ingress_replicas: int,
        *,
        target: str | None = None,
    ) -> None:
        self._handle = handle
        self._num_ingress_replicas = num_ingress_replicas
        self._capacity: int | None = None
        self._metrics = metrics
        self._inbox = inbox
        self._arrivals = arrivals
        self._target_id = target
        # Not by reference: an object in Ray's store for every request would take longer. Serve then sends what is
        # yielded over its own connection between replicas.
        self._generate = handle.generate.options(stream=True, _by_reference=False)
        self._mover = Mover(self, arrivals.has_waiting)
        self._draining = Draining(arrivals.end)

    @classmethod
    async def open(
        cls, handle: Any, host: str, model_name: str, num_ingress_replicas: int, *, target: str | None = None
    ) -> "ServeRouters":
        """Open an inbox on this node's address.

        Args:
            target: `target_id` of the only target that may take requests; None is any. Routers of another one run
                until those that replace them are ready.
        """
        arrivals = Arrivals(LOADS)
        inbox = await Inbox.open(host, arrivals.deliver)
        return cls(handle, inbox, arrivals, IngressMetrics(model_name), num_ingress_replicas, target=target)

    def generate(self, request: Generation) -> Outputs:
        """Send a request to the replica that takes it, and to another one if that is lost."""
        request = replace(request, target_id=self._target_id)
        return LastingOutputs(request, self._submit, self._metrics.observe_resubmission)

    def _submit(self, request: Generation) -> Outputs:
        LOADS.begin(request.request_id, request.num_choices - len(request.finished))
        response = self._generate.remote(request, self._inbox.address)
        outputs = ServeOutputs(response, request.request_id, self._arrivals)
        outputs.on_end(partial(LOADS.end, request.request_id))
        return outputs

    def room(self) -> float:
        """Return how many more requests this Ingress may send; no limit until a Router has said what it holds."""
        return math.inf if self._capacity is None else LOADS.room(self._capacity, self._num_ingress_replicas)

    def retry_after_s(self) -> int:
        """Return after how many seconds clients that are refused should come again."""
        return LOADS.retry_after_s()

    async def describe(self) -> Description:
        """Return what is served, as soon as a replica serves it."""
        other: str | None = None
        while True:
            try:
                description: Description = await self._handle.describe.remote()
            except (RayActorError, DeploymentUnavailableError) as error:
                logger.warning("no Router yet: %s", error)
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
        answers = await self._ask_all("report_queue", self._inbox.address)
        return [answer for answer in answers if isinstance(answer, QueueReport)]

    async def withdraw(self, router_id: str, limit: int) -> int:
        """Have a replica give back waiting requests of this Ingress; return how many sequences they are."""
        answers = await self._ask_all("withdraw", router_id, self._inbox.address, limit)
        return sum(answer for answer in answers if isinstance(answer, int))

    async def collect(self) -> list[list[Metric]]:
        """Return the metrics of this Ingress, and of every replica that answers."""
        answers = await self._ask_all("collect")
        return [self._metrics.collect(), *(metrics for metrics in answers if not isinstance(metrics, Exception))]

    async def check_progress(self) -> None:
        """Raise unless some replica finishes rounds while there is work."""
        answers = await self._ask_all("check_progress")
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if len(errors) == len(answers):
            raise raised_error(errors[-1])

    async def base_url(self) -> str:
        """Return the URL at which Serve listens; only a private function of Serve returns it."""
        client = await asyncio.to_thread(_get_global_client)
        return "" if client is None else client.root_url

    async def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """Call every replica without its queue: a replica whose queue is full must still answer health checks."""
        try:
            response = self._handle.broadcast(method, *args)
            answers = list(await response.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True))
        except TimeoutError:
            raise CapacityError(f"no Router answered within {ANSWER_TIMEOUT_S:g} s") from None
        if not answers:  # Serve leaves out replicas that it finds dead
            raise CapacityError("no Router is running")
        return answers
