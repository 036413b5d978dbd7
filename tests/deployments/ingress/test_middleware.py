import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from deployments.config import AppConfig, Limits
from deployments.ingress import pieces, prompts
from deployments.ingress.body import Bodies
from deployments.ingress.middleware import OPEN_ROUTES
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig
from tests.deployments.serving import serving

KEY = "secret-key"
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.fixture
async def guarded(config: AppConfig, routers: LocalRouters) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(await make_app(config, routers, keys=("another", KEY))) as client:
        yield client


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer ", "Basic secret-key", "secret-key", "bearer secret-key"]
)
async def test_only_a_known_key_opens(guarded: httpx.AsyncClient, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    response = await guarded.post("/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["another", KEY])
async def test_every_known_key_opens(guarded: httpx.AsyncClient, key: str) -> None:
    response = await guarded.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/",
        "//v1/models",
        "/health/../v1/models",
        "/health/",
        "/health/x",
        "/%68ealth/../v1/models",
        "/nothing",
        "/v1/models?path=/health",
        "/v1/models;/health",
    ],
)
async def test_no_path_gets_around_the_key(guarded: httpx.AsyncClient, path: str) -> None:
    scope_path = path.partition("?")[0]
    response = await guarded.get(path, headers={"Host": "/health", "X-Original-URL": "/health"})
    assert response.status_code == 401, scope_path


@pytest.fixture
async def under_a_prefix(config: AppConfig, routers: LocalRouters) -> AsyncIterator[httpx.AsyncClient]:
    """As Serve calls an application whose `route_prefix` is /llm."""
    app = await make_app(config, routers, keys=(KEY,))
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline/llm") as client:
        yield client


async def test_a_prefix_changes_neither_which_routes_are_open_nor_which_are_refused(
    under_a_prefix: httpx.AsyncClient, routers: LocalRouters
) -> None:
    routers.free = 0.0
    headers = {"Authorization": f"Bearer {KEY}"}
    assert (await under_a_prefix.get("/live")).status_code == 200
    assert (await under_a_prefix.get("/v1/models")).status_code == 401
    assert (await under_a_prefix.get("/v1/models", headers=headers)).status_code == 200
    assert (await under_a_prefix.post("/v1/completions", json=BODY, headers=headers)).status_code == 429


async def test_open_routes_need_no_key(guarded: httpx.AsyncClient) -> None:
    statuses = {path: (await guarded.get(path)).status_code for path in OPEN_ROUTES}
    assert statuses == dict.fromkeys(OPEN_ROUTES, 200)


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_large_body_is_refused(client: httpx.AsyncClient, is_chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 2**20

    content = pieces() if is_chunked else b"x" * (5 * 2**20)
    response = await client.post("/v1/completions", content=content)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


async def test_large_headers_are_refused(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models", headers={"x-large": "x" * 20_000})
    assert response.status_code == 431


async def test_a_client_cannot_name_a_request_in_the_engine(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    response = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert routers.last is not None
    assert response.json()["id"] == routers.last.request_id
    assert "mine" not in routers.last.request_id
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_ends_its_request_whatever_its_headers(
    config: AppConfig, routers: LocalRouters, rig: Rig, is_stream: bool
) -> None:
    app = await make_app(config, routers)
    left = asyncio.Event()
    body = b'{"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": %s}' % str(is_stream).lower().encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = http_scope("/v1/completions")
    scope["headers"].append((b"x-request-disconnect-disabled", b"?1"))
    call = asyncio.create_task(app(scope, receive, send))
    while rig.verifier.num_rounds < 3:
        await asyncio.sleep(0.001)
    left.set()
    await call
    assert rig.engine.num_running == 0
    assert rig.engine.num_free_blocks == rig.engine.num_blocks


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


@pytest.mark.parametrize("body", [BODY, {"prompt": 1.5}, {"prompt": "a", "model": "gpt"}, {**BODY, "stream": True}])
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


def http_scope(path: str) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("paceline", 80),
    }


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


async def test_a_client_that_leaves_takes_its_long_text_with_it(
    config: AppConfig, routers: LocalRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    num_pieces = 0

    def encode(*_: object) -> list[int]:
        nonlocal num_pieces
        num_pieces += 1
        has_begun.set()
        assert may_end.wait(30)
        return []

    monkeypatch.setattr(prompts, "_encode", encode)
    monkeypatch.setattr(pieces, "PIECE_CHARS", 50)
    monkeypatch.setattr(prompts, "PIECE_CHARS", 50)
    app = await make_app(config, routers)
    body = json.dumps({"prompt": "some words " * 40}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.to_thread(has_begun.wait, 30)
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(f"{message} was sent")

    await app(http_scope("/tokenize"), receive, send)
    may_end.set()
    async with make_client(app) as client:
        await client.post("/tokenize", json={"prompt": "b" * 60})  # no place to cut at: a piece for each 50, and all
    assert num_pieces == 3


def test_a_body_that_trickles_is_refused_and_its_connection_closed(config: AppConfig, model_dir: Path) -> None:
    limits = Limits(body_timeout_s=0.3)
    with serving(config.model_copy(update={"limits": limits}), model_dir) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body took longer than 0.3 s" in answer
    assert b"\r\nconnection: close\r\n" in answer, "its body would be read as the next request"
