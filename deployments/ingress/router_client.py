"""The Ingress's client of the Routers: calls all replicas by Serve's handle, and raises errors as the Router did."""

import asyncio
import logging
from typing import Any, Protocol

from prometheus_client import Metric
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.ingress.answer import Outputs
from deployments.router.generation import Description, Generation
from engine.errors import CapacityError, TargetError
from engine.sequence import RequestOutput

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
        """Return the metrics of every replica."""
        ...

    async def check_progress(self) -> None:
        """Raise unless rounds are being finished while there is work."""
        ...

    async def base_url(self) -> str:
        """Return where clients reach this application."""
        ...


class ServeOutputs:
    """The outputs of one request over Serve's handle."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def next(self) -> list[RequestOutput]:
        """Return the next outputs; an empty list after the last ones.

        Raises:
            Exception: what the Router raised.
        """
        try:
            outputs: list[RequestOutput] = await anext(self._response, [])
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TargetError("the replica is shutting down") from None
        except Exception as error:  # noqa: BLE001 - every error is passed on to the caller
            raise _raised(error) from None
        return outputs

    async def close(self) -> None:
        """Cancel the call, finished or not; Serve then closes the Router's generator."""
        self._response.cancel()


class ServeRouters:
    """Serve's handle to the Routers."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        # Not by reference: an object in Ray's store for every chunk would take longer than the rest of a round's
        # overhead. Serve then sends chunks over its own connection between replicas.
        self._generate = handle.generate.options(stream=True, _by_reference=False)

    def generate(self, request: Generation) -> Outputs:
        """Send a request to the replica that takes it."""
        return ServeOutputs(self._generate.remote(request))

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
        """Return the metrics of every replica that answers."""
        answers = await self._ask_all("collect")
        return [metrics for metrics in answers if not isinstance(metrics, Exception)]

    async def check_progress(self) -> None:
        """Raise unless some replica finishes rounds while there is work."""
        answers = await self._ask_all("check_progress")
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if len(errors) == len(answers):
            raise _raised(errors[-1])

    async def base_url(self) -> str:
        """Return the URL at which Serve listens; only a private function of Serve returns it."""
        client = await asyncio.to_thread(_get_global_client)
        return "" if client is None else client.root_url

    async def _ask_all(self, method: str) -> list[Any]:
        """Call every replica without its queue: a replica whose queue is full must still answer health checks."""
        try:
            response = self._handle.broadcast(method)
            return list(await response.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True))
        except TimeoutError:
            raise CapacityError(f"no Router answered within {ANSWER_TIMEOUT_S:g} s") from None


def _raised(error: Exception) -> BaseException:
    """Return the error that a replica raised; Ray wraps it in a subclass whose text is a traceback."""
    cause: BaseException | None = getattr(error, "cause", None)
    return cause or error
