"""What Serve's controller knows of the Routers of an application that this process has deployed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ray.serve.context import _get_global_client


async def application(name: str = "default") -> dict[str, Any]:
    client = _get_global_client()
    assert client is not None
    details = await asyncio.to_thread(client.get_serve_details)
    found: dict[str, Any] = details["applications"].get(name, {})
    return found


async def router_details() -> dict[str, Any]:
    deployment: dict[str, Any] = (await application())["deployments"]["Router"]
    return deployment


async def routers() -> tuple[int, int]:
    details = await router_details()
    return details["target_num_replicas"], sum(replica["state"] == "RUNNING" for replica in details["replicas"])


async def wait_until(condition: Callable[[int, int], bool], timeout_s: float = 180) -> float:
    """Return how long it took until the numbers of Routers, aimed at and running, were as they should be."""
    started = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition(*await routers()):
            await asyncio.sleep(0.05)
    return time.monotonic() - started
