"""What enters, under which id, and what becomes of a request whose client leaves."""

import asyncio
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from deployments.config import AppConfig
from deployments.guard import middleware
from deployments.guard.body import Bodies
from deployments.guard.middleware import OPEN_ROUTES, REQUEST_ID, SERVE_HEADERS, SafeHeaders, middlewares, request_id_of
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig
from tests.deployments.requests import http_scope
from tests.deployments.serving import serving

KEY = "secret-key"
BODY = {"prompt": "a", "max_tokens": 2}
USER = [{"role": "user", "content": "a"}]
MADE = re.compile(r"req_[0-9a-f]{32}")


@pytest.fixture
async def guarded(config: AppConfig, routers: LocalRouters) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(await make_app(config, routers, keys=("another", KEY))) as client:
        yield client


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("Authorization", "Bearer ")], 401),
        ([("Authorization", f"Basic {KEY}")], 401),
        ([("Authorization", KEY)], 401),
        ([("Authorization", f"Bearer {KEY.upper()}")], 401),
        ([("Authorization", "Bearer another")], 200),
        ([("Authorization", f"bearer {KEY}")], 200),
        # As Anthropic's clients send it.
        ([("x-api-key", KEY)], 200),
        ([("X-Api-Key", KEY), ("Authorization", "Bearer wrong")], 200),
        ([("x-api-key", "wrong"), ("Authorization", f"Bearer {KEY}")], 200),
        ([("x-api-key", "wrong")], 401),
        ([("x-api-key", f"Bearer {KEY}")], 401),
        ([("x-api-key", KEY), ("Authorization", "Basic x")], 200),
        ([("x-api-key", "wrong"), ("x-api-key", KEY)], 401),
        ([("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer wrong")], 401),
    ],
)
async def test_only_a_known_key_opens(guarded: httpx.AsyncClient, headers: list[tuple[str, str]], status: int) -> None:
    response = await guarded.post("/v1/completions", json=BODY, headers=headers)
    message = await guarded.post("/v1/messages", json={"messages": USER, "max_tokens": 2}, headers=headers)
    assert (response.status_code, message.status_code) == (status, status), message.text
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        error = message.json()
        assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")


async def test_a_request_has_the_digest_of_its_key_as_owner(
    guarded: httpx.AsyncClient, client: httpx.AsyncClient, routers: LocalRouters
) -> None:
    owners = []
    for headers in ({"x-api-key": KEY}, {"Authorization": f"Bearer {KEY}"}, {"x-api-key": "another"}):
        await guarded.post("/v1/completions", json=BODY, headers=headers)
        owners.append(routers.last.owner)
    assert owners[0] == owners[1] == hashlib.sha256(KEY.encode()).hexdigest()[:16] != owners[2]
    await client.post("/v1/completions", json=BODY, headers={"x-api-key": KEY})
    assert routers.last.owner == "", "without keys everybody is one owner"
    assert (await guarded.post("/v1/completions", json={**BODY, "owner": "x"})).status_code == 401
    refusal = await client.post("/v1/completions", json={**BODY, "owner": "x"})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "owner")


@pytest.mark.parametrize("path", ["//v1/models", "/health/../v1/models", "/health/x", "/v1/models?path=/health"])
async def test_no_path_gets_around_the_key(guarded: httpx.AsyncClient, path: str) -> None:
    response = await guarded.get(path, headers={"Host": "/health", "X-Original-URL": "/health"})
    assert response.status_code == 401


async def test_a_prefix_changes_neither_which_routes_are_open_nor_which_are_refused(
    config: AppConfig, routers: LocalRouters
) -> None:
    routers.free = 0.0
    headers = {"Authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(await make_app(config, routers, keys=(KEY,)), root_path="/llm")  # as Serve calls it
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline/llm") as client:
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 429


async def test_open_routes_need_no_key(guarded: httpx.AsyncClient) -> None:
    statuses = {path: (await guarded.get(path)).status_code for path in OPEN_ROUTES}
    assert statuses == dict.fromkeys(OPEN_ROUTES, 200)


async def test_a_client_cannot_name_a_request_in_the_engine(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    response = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert response.json()["id"] == routers.last.request_id
    assert "mine" not in routers.last.request_id
    assert response.headers["x-request-id"] == "mine"


async def test_a_client_that_leaves_before_it_gets_headers_ends_its_request(
    config: AppConfig, routers: LocalRouters, rig: Rig
) -> None:
    """Then a stream's generator has not been started: nothing in it could end the request."""
    app = await make_app(config, routers)
    left = asyncio.Event()
    body = b'{"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    pieces = [body[i : i + 20] for i in range(0, len(body), 20)]

    async def receive() -> Message:
        if pieces:
            await asyncio.sleep(0.002)  # after the headers, and piece by piece
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        left.set()
        await asyncio.Event().wait()

    await asyncio.wait_for(app(http_scope("/v1/completions"), receive, send), 30)
    assert routers.num_closed == 1
    assert rig.engine.num_requests == 0
    assert rig.engine.scheduler.pool.num_free == rig.engine.scheduler.pool.num_blocks


async def test_a_full_queue_refuses_before_the_body_is_read(config: AppConfig, routers: LocalRouters) -> None:
    routers.free = 0.0
    app = await make_app(config, routers, keys=(KEY,))

    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with make_client(app) as client:
        headers = {"Authorization": f"Bearer {KEY}"}
        response = await client.post("/v1/completions", content=endless(), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert response.headers["retry-after"] == "7"
        assert (await client.post("/v1/completions", json=BODY)).status_code == 401
        for path in (*OPEN_ROUTES, "/v1/models"):
            assert (await client.get(path, headers=headers)).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "a"}, headers=headers)).status_code == 200


async def test_a_slow_body_takes_no_room_and_may_come_too_late(config: AppConfig, routers: LocalRouters) -> None:
    routers.free = 1.0
    app = await make_app(config, routers)

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        async with make_client(app) as other:
            assert (await other.post("/v1/completions", json=BODY)).status_code == 200
        routers.free = 0.0
        yield b'"a"}'

    async with make_client(app) as client:
        assert (await client.post("/v1/completions", content=slow())).status_code == 429


@pytest.mark.parametrize("body", [BODY, {"prompt": 1.5}, {"prompt": "a", "model": "gpt"}])
async def test_a_request_takes_room_until_a_router_has_it_or_it_fails(
    config: AppConfig, routers: LocalRouters, body: dict[str, object]
) -> None:
    routers.free = 1.0
    async with make_client(await make_app(config, routers)) as client:
        statuses = {(await client.post("/v1/completions", json=body)).status_code for _ in range(3)}
    assert statuses <= {200, 400, 404}


def test_a_connection_whose_request_was_refused_unread_takes_the_next(
    config: AppConfig, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalRouters, "free", 0.0)
    with serving(config, model_dir) as (url, _), httpx.Client(base_url=url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", content=b"x" * 2**20).status_code == 429
        assert client.get("/v1/models").status_code == 200


async def test_a_client_that_left_while_its_body_came_costs_nothing_more(
    config: AppConfig, routers: LocalRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bodies, "parse", lambda *_: pytest.fail("the body was parsed"))
    app = await make_app(config, routers)
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]
    sent = []

    async def receive():
        return messages.pop()

    async def send(message):
        sent.append(message)

    await app(http_scope("/tokenize"), receive, send)
    assert sent == []


def test_a_body_that_trickles_is_refused_and_its_connection_closed(
    config: AppConfig, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.3)
    with serving(config, model_dir) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body took longer than 0.3 s" in answer
    assert b"\r\nconnection: close\r\n" in answer, "its body would be read as the next request"


def ids(response: httpx.Response) -> list[str]:
    return response.headers.get_list("x-request-id")


@pytest.mark.parametrize("sent", ["mine", "A-1_2.3:4", "x" * 128])
def test_a_safe_id_is_the_clients(sent: str) -> None:
    assert request_id_of([(b"X-Request-Id", sent.encode())]) == sent


@pytest.mark.parametrize("sent", [[""], ["x" * 129], ['a"b'], ["a\x1b[31m"], ["\xe9"], ["a", "b"]])
def test_an_unsafe_id_is_replaced_and_so_are_several(sent: list[str]) -> None:
    assert MADE.fullmatch(request_id_of([(b"x-request-id", text.encode("latin-1")) for text in sent]))


async def test_every_answer_has_one_id(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/nowhere", "/health"):
        assert ids(await client.get(path, headers={"x-request-id": "mine"})) == ["mine"]
        [made] = ids(await client.get(path))
        assert MADE.fullmatch(made)


async def test_an_application_gets_one_id_and_no_orders_to_serve_and_its_answer_has_that_id_alone() -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Request-ID", b"other")]})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    orders = [(name.title(), b"1") for name in SERVE_HEADERS]
    headers = [*orders, (b"x-mine", b"1"), (b"X-Request-ID", b"mine")]
    await SafeHeaders(app)({"type": "http", "headers": headers}, receive, send)
    assert scopes[0]["headers"] == [(b"x-mine", b"1"), (REQUEST_ID, b"mine")]
    assert sent[0]["headers"] == [(REQUEST_ID, b"mine")]


async def test_error_bodies_hold_the_id(client: httpx.AsyncClient) -> None:
    for body, headers, status in (({"prompt": "a", "model": "x"}, {}, 404), ({}, {"x-large": "x" * 20_000}, 431)):
        response = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine", **headers})
        assert (response.status_code, response.json()["error"]["request_id"]) == (status, "mine")


async def test_concurrent_requests_do_not_mix_their_ids(client: httpx.AsyncClient) -> None:
    async def refused(name: str) -> str:
        response = await client.post("/v1/completions", json={}, headers={"x-request-id": name})
        request_id: str = response.json()["error"]["request_id"]
        return request_id

    names = [f"n{number}" for number in range(20)]
    assert await asyncio.gather(*map(refused, names)) == names


@pytest.mark.parametrize("line", [b"A: \x01b", b"A\x1b: b", b"no colon"])
def test_what_is_no_http_is_refused_in_json(line: bytes) -> None:
    middlewares()
    sent, config = bytearray(), Config(SafeHeaders)
    config.load()
    transport = SimpleNamespace(write=sent.extend, close=lambda: sent.extend(b"."), get_extra_info=lambda _: None)
    connection = AutoHTTPProtocol(config, ServerState(), {}, _loop=asyncio.new_event_loop())
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n")
    head, _, body = bytes(sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"content-length: {len(body) - 1}".encode() in head
    assert body.endswith(b".")
    assert json.loads(body[:-1])["error"]["type"] == "invalid_request_error"
