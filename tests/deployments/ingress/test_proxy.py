"""What the proxy does before Serve: the ASGI middlewares alone, and with the Ingress behind them."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config import AppConfig, Limits
from deployments.ingress.proxy import EARLY_BODY, MAX_EARLY_BYTES, SERVE_HEADERS, middlewares
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters


class Behind:
    """An application that keeps what it is called with, and receives until nothing more is promised."""

    def __init__(self) -> None:
        self.scope: Scope = {}
        self.messages: list[Message] = []
        self.rest: Receive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.messages.append(await receive())
        while self.messages[-1].get("more_body"):
            self.messages.append(await receive())
        self.rest = receive

    @property
    def early(self) -> bytes | None:
        found: bytes | None = self.scope.get("extensions", {}).get(EARLY_BODY)
        return found


def before(app: ASGIApp) -> ASGIApp:
    """Put the middlewares before an application, as the proxy does: the last one is the first to see a request."""
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


def pieces(*bodies: bytes) -> list[Message]:
    return [
        {"type": "http.request", "body": body, "more_body": number < len(bodies)}
        for number, body in enumerate(bodies, start=1)
    ]


async def call(messages: Iterable[Message], headers: Iterable[tuple[bytes, bytes]]) -> Behind:
    """Send a request; return what came behind the middlewares."""
    behind, left = Behind(), list(messages)

    async def receive() -> Message:
        return left.pop(0)

    async def send(_: Message) -> None:
        raise AssertionError("nothing was to be sent")

    scope: dict[str, Any] = {"type": "http", "headers": list(headers), "extensions": {"theirs": {}}}
    await before(behind)(scope, receive, send)
    assert scope["extensions"] == {"theirs": {}}
    return behind


async def test_a_small_body_travels_with_its_head_and_can_be_received_as_ever() -> None:
    sent = pieces(b"ab", b"", b"cde")
    behind = await call(sent, [(b"Content-Length", b"5")])
    assert behind.early == b"abcde"
    assert behind.messages == sent
    assert "theirs" in behind.scope["extensions"]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"transfer-encoding", b"chunked")],
        [(b"content-length", b"0")],
        [(b"content-length", str(MAX_EARLY_BYTES + 1).encode())],
        [(b"content-length", b"-1")],
        [(b"content-length", b"x")],
        [(b"content-length", b"0" * 5000 + b"5")],
        [(b"content-length", b"5"), (b"content-length", b"5")],
        [(b"content-length", b"5"), (b"Transfer-Encoding", b"chunked")],
    ],
    ids=["nothing", "chunked", "empty", "too large", "negative", "no number", "zeros", "twice", "in two ways"],
)
async def test_any_other_body_is_left_to_whoever_receives_it(headers: list[tuple[bytes, bytes]]) -> None:
    sent = pieces(b"ab", b"cde")
    behind = await call(sent, headers)
    assert behind.early is None
    assert behind.messages == sent


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_seen_to() -> None:
    sent: list[Message] = [{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.disconnect"}]
    behind = await call(sent, [(b"content-length", b"5")])
    assert behind.early is None
    assert behind.messages == sent


async def test_a_client_that_leaves_after_its_body_is_seen_to() -> None:
    behind = await call([*pieces(b"abcde"), {"type": "http.disconnect"}], [(b"content-length", b"5")])
    assert await behind.rest() == {"type": "http.disconnect"}


async def test_the_largest_early_body() -> None:
    body = b"x" * MAX_EARLY_BYTES
    assert (await call(pieces(body), [(b"content-length", str(MAX_EARLY_BYTES).encode())])).early == body


async def test_headers_that_are_orders_to_the_proxy_are_dropped() -> None:
    headers = [(name.title(), b"1") for name in SERVE_HEADERS]
    behind = await call(pieces(b""), [*headers, (b"x-mine", b"1")])
    assert behind.scope["headers"] == [(b"x-mine", b"1")]


@pytest.fixture
async def client(config: AppConfig, routers: LocalRouters) -> AsyncIterator[httpx.AsyncClient]:
    """One of an Ingress that gets nothing after the head for as long as any test takes."""
    ingress = await make_app(config, routers)

    async def without_receiving(scope: Scope, receive: Receive, send: Send) -> None:
        async def nothing() -> Message:
            await asyncio.sleep(10)
            return {"type": "http.disconnect"}

        await ingress(scope, nothing, send)

    async with make_client(before(without_receiving)) as client:
        yield client


async def test_the_ingress_takes_the_body_that_came_with_the_head(
    client: httpx.AsyncClient, config: AppConfig, routers: LocalRouters
) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200
    async with make_client(await make_app(config, routers)) as other:
        expected = (await other.post("/v1/completions", json=body)).json()
    assert response.json()["choices"] == expected["choices"]


async def test_a_limit_holds_for_a_body_that_came_with_the_head(config: AppConfig, routers: LocalRouters) -> None:
    small = config.model_copy(update={"limits": Limits(max_body_bytes=1024)})
    async with make_client(before(await make_app(small, routers))) as client:
        response = await client.post("/v1/completions", content=b"x" * 1025)
    assert response.status_code == 413
