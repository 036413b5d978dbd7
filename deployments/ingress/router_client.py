"""The Ingress's client of the Routers: calls all replicas by Serve's handle, and raises errors as the Router did."""

import asyncio
import logging
from itertools import chain
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.transport import Inbox
from deployments.ingress.answer import Outputs
from deployments.ingress.arrivals import Arrivals, ServeOutputs
from deployments.ingress.broadcast import ask_all
from deployments.ingress.lasting_outputs import LastingOutputs
from deployments.metrics import IngressMetrics, ReplicaMetrics
from deployments.router.generation import Description, Generation
from deployments.router.state import RouterState

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

RETRY_PAUSE_S = 2.0


class RouterHandle(Protocol):
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

    def __init__(self, handle: Any, inbox: Inbox, arrivals: Arrivals, metrics: IngressMetrics) -> None:
        self._handle = handle
        self._metrics = metrics
        context = serve.get_replica_context()
        self._replica = context.replica_tag
        self._ingresses = serve.get_deployment_handle(context.deployment, context.app_name)
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
        return LastingOutputs(request, self._submit, self._metrics.observe_resubmission)

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
