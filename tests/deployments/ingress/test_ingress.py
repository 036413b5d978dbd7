"""Ingress: which requests it takes, and what it says of the others."""

import asyncio

import pytest

from deployments.config import AppConfig, Limits
from deployments.ingress.ingress import Ingress
from deployments.sections import ingress_config
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig


async def test_a_full_queue_is_429_before_a_stream_starts(config: AppConfig) -> None:
    rig = Rig(max_queued_requests=1)
    async with make_client(await make_app(config, LocalRouters(rig))) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert response.headers["retry-after"] == "1"  # nothing is waiting: the request itself is too much
    await rig.loop.stop()


async def test_a_request_over_its_deadline_is_408(config: AppConfig, routers: LocalRouters, rig: Rig) -> None:
    limits = Limits(request_timeout_s=0.01)
    rig.verifier.gate.clear()
    app = await make_app(config.model_copy(update={"limits": limits}), routers)
    async with make_client(app) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-seconds": "0"}
        )
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    rig.verifier.gate.set()


async def test_requests_wait_for_the_models(config: AppConfig, routers: LocalRouters) -> None:
    routers.has_loaded.clear()
    async with make_client(await make_app(config, routers)) as client:
        requests = [
            asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})),
            asyncio.create_task(client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2})),
            asyncio.create_task(client.get("/v1/models")),
        ]
        await asyncio.wait(requests, timeout=0.05)
        assert not any(request.done() for request in requests)
        routers.has_loaded.set()
        assert [response.status_code for response in await asyncio.gather(*requests)] == [200, 200, 200]


async def test_requests_wait_for_the_models_no_longer_than_they_may_take(
    config: AppConfig, routers: LocalRouters
) -> None:
    routers.has_loaded.clear()
    short = config.model_copy(update={"limits": Limits(request_timeout_s=0.01)})
    async with make_client(await make_app(short, routers)) as client:
        response = await client.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the models are still being loaded")


async def test_an_ingress_that_cannot_find_out_what_is_served_is_replaced(
    config: AppConfig, routers: LocalRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve replaces replicas whose health check fails."""
    routers.has_loaded.clear()
    ingress = object.__new__(Ingress)
    await ingress.__init__(ingress_config(config), routers)
    await ingress.check_health()
    monkeypatch.delattr(LocalRouters, "base_url")
    routers.has_loaded.set()
    await asyncio.wait([ingress._serving])
    with pytest.raises(AttributeError, match="base_url"):
        await ingress.check_health()
