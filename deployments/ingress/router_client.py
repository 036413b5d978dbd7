"""The Routers as an Ingress sees them: all replicas, over Serve's handle; what they raise arrives as they raised it."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from prometheus_client import Metric
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.router.generation import Generation
from deployments.router.router import Description
from engine.errors import CapacityError, TargetError
from engine.sequence import RequestOutput

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

ANSWER_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 2.0


class RouterHandle(Protocol):
    """What the Ingress asks of Routers; Serve's handle behind `ServeRouters`, or a fake."""

    def generate(self, request: Generation) -> AsyncGenerator[list[RequestOutput], None]:
        """Stream a request's tokens."""
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


class ServeRouters:
    """Serve's handle to the Routers; errors come out as what the Router raised."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        # Not by reference: over Serve's own connection between replicas. A delivery as an object in Ray's store costs
        # more than a round's whole overhead.
        self._generate = handle.generate.options(stream=True, _by_reference=False)

    async def generate(self, request: Generation) -> AsyncGenerator[list[RequestOutput], None]:
        """Stream a request's tokens from the replica that takes it."""
        rounds = self._generate.remote(request)
        try:
            async for outputs in rounds:
                yield outputs
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TargetError("the replica is shutting down") from None
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes on to the caller
            # Ray wraps what a replica raised in a subclass whose text is a traceback.
            raise getattr(error, "cause", None) or error from None
        finally:
            rounds.cancel()

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
        return [found for found in await self._ask_all("collect") if not isinstance(found, Exception)]

    async def check_progress(self) -> None:
        """Raise unless some replica finishes rounds while there is work."""
        answers = await self._ask_all("check_progress")
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if len(errors) == len(answers):
            raise getattr(errors[-1], "cause", None) or errors[-1]

    async def base_url(self) -> str:
        """Return where Serve listens; it has no public way to tell."""
        client = await asyncio.to_thread(_get_global_client)
        return "" if client is None else client.root_url

    async def _ask_all(self, method: str) -> list[Any]:
        """Ask every replica, past its queue: one that is full must still be able to say that it is well."""
        try:
            response = self._handle.broadcast(method)
            return list(await response.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True))
        except TimeoutError:
            raise CapacityError(f"no Router answered within {ANSWER_TIMEOUT_S:g} s") from None
