"""/demo/kill: who may kill what, and what happens where there is no such process."""

import httpx
import pytest

from deployments.config import AppConfig
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters


def demo(config: AppConfig) -> AppConfig:
    return config.model_copy(update={"page": "demo"})


async def kill(config: AppConfig, routers: LocalRouters, process: str, **headers: str) -> httpx.Response:
    async with make_client(await make_app(config, routers, keys=("right",))) as client:
        return await client.post("/demo/kill", json={"process": process}, headers=headers)


async def test_a_demo_kills_the_process_that_is_named(config: AppConfig, routers: LocalRouters) -> None:
    for process in ("draft", "target", "router"):
        response = await kill(demo(config), routers, process, Authorization="Bearer right")
        assert (response.status_code, response.json()) == (202, {"killed": process})
    assert routers.killed == ["draft", "target", "router"]


async def test_nothing_is_killed_without_a_key_for_another_process_or_outside_a_demo(
    config: AppConfig, routers: LocalRouters
) -> None:
    key = {"Authorization": "Bearer right"}
    assert (await kill(demo(config), routers, "draft")).status_code == 401
    refused = await kill(demo(config), routers, "controller", **key)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "process")
    assert (await kill(config, routers, "draft", **key)).status_code == 404
    async with make_client(await make_app(demo(config), routers)) as client:  # as a form of another page would send it
        assert (await client.post("/demo/kill", content='{"process": "draft"}')).status_code == 415
    assert routers.killed == []


@pytest.mark.parametrize(
    ("sender", "headers", "status"),
    [
        ("127.0.0.1", {"Host": "127.0.0.1:8000"}, 202),
        ("::1", {"Host": "localhost", "Origin": "http://localhost"}, 202),
        ("127.0.0.1", {"Host": "rebound.example"}, 403),
        ("127.0.0.1", {"Host": "127.0.0.1:8000", "Origin": "http://other.example"}, 403),
        ("127.0.0.1", {"Host": "127.0.0.1:8000", "Origin": "null"}, 403),
        ("192.0.2.7", {"Host": "localhost"}, 403),
    ],
)
async def test_without_keys_only_this_machines_page_kills(
    config: AppConfig, routers: LocalRouters, sender: str, headers: dict[str, str], status: int
) -> None:
    transport = httpx.ASGITransport(await make_app(demo(config), routers), client=(sender, 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        response = await client.post("/demo/kill", json={"process": "draft"}, headers=headers)
    assert response.status_code == status
    assert routers.killed == ["draft"] * (status == 202)


async def test_a_process_that_is_not_there_is_503(config: AppConfig, routers: LocalRouters) -> None:
    routers.has_processes = False
    response = await kill(demo(config), routers, "draft", Authorization="Bearer right")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "there is no draft process now"
