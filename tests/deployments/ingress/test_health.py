"""The health routes, for programs and for people."""

import asyncio

import httpx

from deployments.config import AppConfig
from engine.config import CompileProgress
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig


async def until(client: httpx.AsyncClient, path: str, status: int) -> httpx.Response:
    async with asyncio.timeout(5):
        while (response := await client.get(path)).status_code != status:
            await asyncio.sleep(0)
    return response


async def test_a_server_that_works_is_live_and_ready(client: httpx.AsyncClient) -> None:
    for path in ("/live", "/ready"):
        assert (await until(client, path, 200)).json() == {"status": "ok"}
    body = (await until(client, "/health", 200)).json()
    assert body["routers"].pop().items() >= {"replica": "router", "ready": True, "reason": None}.items()
    assert body == {"status": "ok", "live": True, "ready": True, "reason": None, "routers": []}


async def test_a_server_that_compiles_says_how_far_it_is(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    await until(client, "/ready", 200)
    [router] = (await client.get("/health")).json()["routers"]
    assert "compiling" not in router
    routers.compiling = CompileProgress(3, 6, 41.7)
    [router] = (await client.get("/health")).json()["routers"]
    assert router["compiling"] == {"done": 3, "of": 6, "left_s": 42}


async def test_a_server_that_loads_is_live_and_not_ready(config: AppConfig, routers: LocalRouters) -> None:
    routers.has_loaded.clear()
    async with make_client(await make_app(config, routers)) as client:
        assert (await client.get("/live")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        assert ready.json()["error"]["message"] == "the models are still being loaded"
        health = await client.get("/health")
        assert (health.status_code, health.headers["retry-after"]) == (503, "1")
        loading = {"status": "unavailable", "live": True, "ready": False, "reason": "the models are still being loaded"}
        assert health.json() == {**loading, "routers": []}
        routers.has_loaded.set()
        await until(client, "/ready", 200)


async def test_a_server_that_is_stuck_is_live_and_not_ready(client: httpx.AsyncClient, rig: Rig) -> None:
    await until(client, "/ready", 200)
    await rig.loop.stop()
    assert (await until(client, "/ready", 503)).json()["error"]["message"] == "the round loop has ended"
    assert (await client.get("/health")).json()["routers"][0]["ready"] is False
    assert (await client.get("/live")).status_code == 200
