"""ask_all: call every replica of a deployment, however many requests each has; a late one hides no other."""

import asyncio
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError

from deployments.ingress.arrivals import raised_error

ANSWER_TIMEOUT_S = 2.0


async def ask_all(handle: Any, method: str, *args: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Any]:
    """Return the answer of each replica that Serve thinks is running, or the exception that came instead.

    One that does not answer in time is a TimeoutError. Serve's public call returns nothing then, also of the others.
    """
    response = handle.broadcast(method, *args)  # which passes the replica's queue by
    try:
        async with asyncio.timeout(timeout_s):
            calls = await response._fetch_replica_results_async()
    except TimeoutError as error:
        return [error]
    except DeploymentUnavailableError:
        return []
    return await asyncio.gather(*(_answer(call, timeout_s) for call in calls))


async def _answer(call: Any, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await call.get_async()
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - returned to the caller
        return raised_error(error)
