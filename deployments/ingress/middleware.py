"""Guard: the ASGI middleware before every route: limits, the API key, full queues, and clients that leave.

Routes that need no key are `OPEN_ROUTES`; every other path needs one, known or not. The route is the one that FastAPI
will choose: the path of the request, which no header can change, after the prefix under which Serve has put the
application.

Serve's proxy obeys headers by which a client can switch off its deadline and its disconnect detection. Nothing here
relies on the proxy dropping them (`proxy.py`): the Router keeps the deadlines, and this middleware notices clients that
leave.
"""

import asyncio
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config import Limits
from deployments.errors import describe, error_body, headers_of, kind_of_status
from deployments.ingress.admission import GENERATING_ROUTES, Admission
from deployments.request_id import current_request_id, request_id_of
from engine.errors import QueueFullError

OPEN_ROUTES = frozenset({"/live", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"})


class Guard:
    """Refuses requests that are too large, have no key, or find the queue full, before anything parses them."""

    def __init__(self, app: ASGIApp, *, limits: Limits, api_keys: Sequence[str], admission: Admission) -> None:
        self._app = app
        self._admission = admission
        self._limits = limits
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        current_request_id.set(request_id_of(headers))
        size = sum(len(name) + len(value) for name, value in headers)
        if size > (limit := self._limits.max_header_bytes):
            await _refuse(send, 431, f"the headers have {size:,} bytes, at most {limit:,} are allowed")
            return
        path = get_route_path(scope)
        if self._keys and path not in OPEN_ROUTES and not self._has_key(headers):
            await _refuse(send, 401, "no valid API key; send 'Authorization: Bearer <key>'")
            return
        is_generating = path in GENERATING_ROUTES
        if is_generating and await self._refuse_if_full(send):
            return
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                messages = await self._read(receive)
        except TimeoutError:
            limit_s = self._limits.body_timeout_s
            await _refuse(send, 408, f"the body took longer than {limit_s:g} s", {"Connection": "close"})
            return
        if messages is None:
            limit = self._limits.max_body_bytes
            await _refuse(send, 413, f"the body is larger than {limit:,} bytes")
            return
        if messages[-1]["type"] == "http.disconnect":
            return
        if not is_generating:
            await _run_while_connected(self._app, scope, messages, receive, send)
        elif not await self._refuse_if_full(send):  # others came while the body did, which may be slow
            with self._admission.preparing():
                await self._admission.turn()
                await _run_while_connected(self._app, scope, messages, receive, send)

    async def _refuse_if_full(self, send: Send) -> bool:
        """Send 429 and return True if there is no room for one more request."""
        try:
            self._admission.check()
        except QueueFullError as error:
            kind, body = describe(error)
            await _send_error(send, kind.status, body, headers_of(kind, error))
            return True
        return False

    def _has_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        sent = [value for name, value in headers if name.lower() == b"authorization"]
        if len(sent) != 1 or not sent[0].startswith(b"Bearer "):
            return False
        # Every key is compared, each in constant time, so that the time of the answer reveals nothing.
        matches = [hmac.compare_digest(sent[0][7:], key) for key in self._keys]
        return any(matches)

    async def _read(self, receive: Receive) -> list[Message] | None:
        """Return all messages of the body; None if it is too large, sent whole or in chunks."""
        messages: list[Message] = []
        size = 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self._limits.max_body_bytes:
                return None
            if message["type"] != "http.request" or not message.get("more_body"):
                return messages


async def _run_while_connected(
    app: ASGIApp, scope: Scope, messages: list[Message], receive: Receive, send: Send
) -> None:
    """Run a route on a body that has been read; cancel it when the client leaves, streaming or not."""
    body = b"".join(message.get("body", b"") for message in messages)
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()

    async def replay() -> Message:
        if pending:
            return pending.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    route = asyncio.ensure_future(app(scope, replay, send))
    watcher = asyncio.create_task(watch())
    try:
        await asyncio.wait([route, watcher], return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        route.cancel()
        await asyncio.wait([route, watcher])
    if not route.cancelled():
        route.result()


async def _refuse(send: Send, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
    kind = kind_of_status(status)
    await _send_error(send, status, error_body(kind, message), {**headers_of(kind), **(headers or {})})


async def _send_error(send: Send, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    content = json.dumps(body).encode()
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    lines += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": content})
