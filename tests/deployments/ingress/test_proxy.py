"""The middleware of Serve's proxy."""

from typing import Any

from starlette.types import Message, Receive, Scope, Send

from deployments.ingress.proxy import SERVE_HEADERS, middlewares
from deployments.request_id import HEADER


async def scope_after(scope: dict[str, Any]) -> Scope:
    """The scope that an application behind the middlewares gets."""
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)

    async def receive() -> Message:
        raise AssertionError("the middlewares read nothing")

    async def send(_: Message) -> None:
        raise AssertionError("the middlewares send nothing")

    wrapped: Any = app
    for middleware in middlewares():
        wrapped = middleware.cls(wrapped, *middleware.args, **middleware.kwargs)
    await wrapped(scope, receive, send)
    return scopes[0]


async def test_headers_that_are_orders_to_the_proxy_are_dropped() -> None:
    headers = [(name.title(), b"1") for name in SERVE_HEADERS]
    scope = await scope_after({"type": "http", "headers": [*headers, (b"x-mine", b"1")]})
    [mine, request_id] = scope["headers"]
    assert mine == (b"x-mine", b"1")
    assert request_id[0] == HEADER


async def test_other_connections_pass_unchanged() -> None:
    scope = {"type": "websocket", "headers": [(b"x-request-id", b"1")]}
    assert await scope_after(scope) == scope
