"""ASGI middleware before every route: request ids, limits, API keys, full queues, and clients that leave.

Serve's HTTP servers load `middlewares` by a variable of `deployments/local/environment.py`, and so drop the headers by
which a client could switch off Serve's deadlines. `Guard`, in the Ingress, does not rely on that.
"""

import asyncio
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from deployments.config import Limits
from deployments.errors import describe, error_body, headers_of, kind_of_status, set_request
from deployments.guard.admission import GENERATING_ROUTES, PREPARATION, Admission
from engine.errors import QueueFullError

OPEN_ROUTES = frozenset(
    {"/live", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"}
    | {"/", "/page.css", "/page.js", "/rounds.js"}
)
"""The paths that need no key, compared as FastAPI does: without Serve's prefix, whatever the headers say."""
MAX_HEADER_BYTES = 16 * 2**10
"""Bytes of all request headers; HAProxy's buffer holds twice as many, so a larger request gets an answer."""
BODY_TIMEOUT_S = 60.0
"""Seconds that a client may take to send the body."""
SERVE_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
REQUEST_ID = b"x-request-id"
SAFE_ID = r"[A-Za-z0-9._:-]{1,128}"
"""What a client may call its request: safe to log and to send back."""

Headers = Iterable[tuple[bytes, bytes]]


def request_id_of(headers: Headers) -> str:
    """Return the id in the headers if it is safe and the only id there, else a new id."""
    sent = [value for name, value in headers if name.lower() == REQUEST_ID]
    if len(sent) == 1 and re.fullmatch(SAFE_ID.encode(), sent[0]):
        return sent[0].decode()
    return f"req_{secrets.token_hex(16)}"


class SafeHeaders:
    """Drops Serve's control headers, and gives each request and its answer one safe id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = REQUEST_ID, request_id_of(scope["headers"]).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*_other_headers(message.get("headers", ())), request_id]}
            await send(message)

        await self._app({**scope, "headers": [*_other_headers(scope["headers"]), request_id]}, receive, send_with_id)


def _other_headers(headers: Headers) -> Headers:
    return (field for field in headers if field[0].lower() not in SERVE_HEADERS | {REQUEST_ID})


def middlewares() -> list[Middleware]:
    """Return the middlewares for Serve's HTTP servers, and make uvicorn's own 400 answers JSON."""
    server: Any = AutoHTTPProtocol
    server.send_400_response = _refuse
    return [Middleware(SafeHeaders)]


def _refuse(connection: Any, _reason: str) -> None:
    """Answer invalid HTTP, such as a control character in a header, in uvicorn's place."""
    message = "the request is no valid HTTP; a header may hold a control character"
    body = json.dumps(error_body(kind_of_status(400), message)).encode()
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    connection.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
    connection.transport.close()


class Guard:
    """Refuses requests that are too large, have no key, or find the queue full, before anything parses them."""

    def __init__(self, app: ASGIApp, *, limits: Limits, api_keys: Sequence[str], admission: Admission) -> None:
        self._app = app
        self._admission = admission
        self._limits = limits
        self._owners = {key.encode(): hashlib.sha256(key.encode()).hexdigest()[:16] for key in api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = get_route_path(scope)
        set_request(request_id_of(scope["headers"]), path)
        is_generating = path in GENERATING_ROUTES
        try:
            owner = self._check_headers(scope["headers"], path)
            if is_generating:
                self._admission.check(owner)
            body = await self._read(receive)
            if is_generating:
                self._admission.check(owner)  # others may have come during a slow body
        except ClientDisconnect:
            return
        except (HTTPException, QueueFullError) as error:
            kind, content = describe(error)
            if is_generating:
                self._admission.count_refusal(kind)
            await JSONResponse(content, kind.status, headers_of(kind, error))(scope, receive, send)
        else:
            if not is_generating:
                await self._run_while_connected(scope, body, receive, send)
                return
            with self._admission.preparing(owner) as preparation:
                await self._admission.turn()
                await self._run_while_connected({**scope, PREPARATION: preparation}, body, receive, send)

    def _check_headers(self, headers: list[tuple[bytes, bytes]], path: str) -> str:
        """Return the request's owner, the digest of its API key; empty if no key is needed."""
        size = sum(len(name) + len(value) for name, value in headers)
        if size > (limit := MAX_HEADER_BYTES):
            raise HTTPException(431, f"the headers have {size:,} bytes, at most {limit:,} are allowed")
        if not self._owners or path in OPEN_ROUTES:
            return ""
        if (owner := self._owner(headers)) is None:
            raise HTTPException(401, "no valid API key; send 'Authorization: Bearer <key>' or 'x-api-key: <key>'")
        return owner

    def _owner(self, headers: Headers) -> str | None:
        bearers = [value for name, value in headers if name.lower() == b"authorization"]
        given = [value for name, value in headers if name.lower() == b"x-api-key"]
        if len(bearers) > 1 or len(given) > 1:  # few guesses a request
            return None
        given += [value[7:] for value in bearers if value[:7].lower() == b"bearer "]
        # Every key is compared, each in constant time, so that the time of the answer reveals nothing.
        matches = [(owner, hmac.compare_digest(value, key)) for value in given for key, owner in self._owners.items()]
        return next((owner for owner, is_match in matches if is_match), None)

    async def _read(self, receive: Receive) -> bytes:
        limit_s, limit = BODY_TIMEOUT_S, self._limits.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(limit_s):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise HTTPException(413, f"the body is larger than {limit:,} bytes")
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise HTTPException(408, f"the body took longer than {limit_s:g} s", {"Connection": "close"}) from None
        raise ClientDisconnect

    async def _run_while_connected(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run a route on a body that has been read; cancel it when the client leaves, streaming or not."""
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await asyncio.Future()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._app(scope, replay, send)),
            asyncio.create_task(watch()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()
