"""The Ingress's client of the Routers: calls all replicas by Serve's handle, and raises errors as the Router did."""

import asyncio
import logging
from typing import Any, Protocol

from prometheus_client import Metric
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.transport import Inbox
from deployments.ingress.answer import Outputs
from deployments.ingress.arrivals import Arrivals, ServeOutputs, raised_error
from deployments.ingress.counted_outputs import CountedOutputs
from deployments.ingress.lasting_outputs import LastingOutputs
from deployments.metrics import IngressMetrics
from deployments.router.generation import Description, Generation
from engine.errors import CapacityError

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

ANSWER_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 2.0


class RouterHandle(Protocol):
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

    def __init__(self, handle: Any, inbox: Inbox, arrivals: Arrivals, metrics: IngressMetrics) -> None:
        self._handle = handle
        self._metrics = metrics
        self._inbox = inbox
        self._arrivals = arrivals
        # Not by reference: an object in Ray's store for every request would take longer. Serve then sends what is
        # yielded over its own connection between replicas.
        self._generate = handle.generate.options(stream=True, _by_reference=False)

    @classmethod
    async def open(cls, handle: Any, host: str, model_name: str) -> "ServeRouters":
        """Open an inbox on this node's address."""
        arrivals = Arrivals()
        return cls(handle, await Inbox.open(host, arrivals.deliver), arrivals, IngressMetrics(model_name))

    def generate(self, request: Generation) -> Outputs:
        """Send a request to the replica that takes it, and to another one if that is lost."""
        lasting = LastingOutputs(request, self._submit, self._metrics.observe_resubmission)
        return CountedOutputs(lasting, self._metrics)

    def _submit(self, request: Generation) -> Outputs:
        response = self._generate.remote(request, self._inbox.address)
        return ServeOutputs(response, request.request_id, self._arrivals)

    async def describe(self) -> Description:
        """Return what is served, as soon as a replica serves it."""
        while True:
            try:
                description: Description = await self._handle.describe.remote()
            except (RayActorError, DeploymentUnavailableError) as error:
                logger.warning("no Router yet: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return description

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

    async def _ask_all(self, method: str) -> list[Any]:
        """Call every replica without its queue: a replica whose queue is full must still answer health checks."""
        try:
            response = self._handle.broadcast(method)
            answers = list(await response.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True))
        except TimeoutError:
            raise CapacityError(f"no Router answered within {ANSWER_TIMEOUT_S:g} s") from None
        if not answers:  # Serve leaves out replicas that it finds dead
            raise CapacityError("no Router is running")
        return answers
