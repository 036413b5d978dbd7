"""Every answer has a request id, the client's own if it is safe, and every error body holds it."""

import asyncio
import json
import re

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from deployments.config import AppConfig, Limits
from deployments.ingress.router_client import RouterHandle
from deployments.request_id import RequestIds, request_id_of
from engine.errors import TargetError
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import GREEDY

BODY = {"prompt": "abc", **GREEDY}
MADE = re.compile(r"req_[0-9a-f]{32}")
UNSAFE = ["", "x" * 129, "a b", 'a"b', "a\x1b[31m", "a,b", "\xe9"]


def ids(response: httpx.Response) -> list[str]:
    return response.headers.get_list("x-request-id")


@pytest.mark.parametrize("sent", ["mine", "A-1_2.3:4", "x" * 128])
def test_a_safe_id_is_the_clients(sent: str) -> None:
    assert request_id_of([(b"X-Request-Id", sent.encode())]) == sent


@pytest.mark.parametrize("sent", UNSAFE)
def test_an_unsafe_id_is_replaced(sent: str) -> None:
    assert MADE.fullmatch(request_id_of([(b"x-request-id", sent.encode("latin-1"))]))


def test_several_ids_are_none() -> None:
    assert MADE.fullmatch(request_id_of([(b"x-request-id", b"a"), (b"X-Request-ID", b"b")]))


async def test_every_answer_has_one_id(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/nowhere", "/health"):
        assert ids(await client.get(path, headers={"x-request-id": "mine"})) == ["mine"]
        [made] = ids(await client.get(path))
        assert MADE.fullmatch(made)
    assert ids(await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})) == ["mine"]


async def test_an_answer_that_has_an_id_gets_no_second_one() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Request-ID", b"other")]})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    await RequestIds(app)({"type": "http", "headers": [(b"x-request-id", b"mine")]}, receive, send)
    assert sent[0]["headers"] == [(b"x-request-id", b"mine")]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [(b"{", {}, 400), (b'{"prompt": "a", "model": "x"}', {}, 404), (b"", {"x-large": "x" * 20_000}, 431)],
)
async def test_error_bodies_hold_the_id(
    client: httpx.AsyncClient, content: bytes, headers: dict[str, str], status: int
) -> None:
    response = await client.post(
        "/v1/completions",
        content=content,
        headers={"content-type": "application/json", "x-request-id": "mine", **headers},
    )
    assert response.status_code == status
    assert response.json()["error"]["request_id"] == "mine"


async def test_an_error_without_a_key_holds_the_id(config: AppConfig, routers: RouterHandle) -> None:
    async with make_client(await make_app(config, routers, keys=("key",))) as client:
        response = await client.get("/v1/models")
    assert response.status_code == 401
    assert [response.json()["error"]["request_id"]] == ids(response)


async def test_an_error_in_mid_stream_holds_the_id(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    routers.error = TargetError("gone")
    body = {**BODY, "stream": True, "max_tokens": 100}
    response = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert response.status_code == 200
    assert events[-1]["error"]["request_id"] == "mine"
    assert ids(response) == ["mine"]


async def test_concurrent_requests_do_not_mix_their_ids(config: AppConfig, routers: RouterHandle) -> None:
    app = await make_app(config.model_copy(update={"limits": Limits(max_prompts=1)}), routers)
    async with make_client(app) as client:

        async def refused(name: str) -> str:
            body = {"prompt": ["a", "b"]}
            response = await client.post("/v1/completions", json=body, headers={"x-request-id": name})
            assert response.status_code == 400
            request_id: str = response.json()["error"]["request_id"]
            return request_id

        names = [f"n{number}" for number in range(20)]
        assert await asyncio.gather(*map(refused, names)) == names
