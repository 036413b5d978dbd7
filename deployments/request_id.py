"""The id of an HTTP request: the client's `x-request-id` if it is safe to log and to send back, else one made here.

Every answer has it as a header, and every error body as a field. Serve takes it from the request's header, hands it on
with the call to the Router, and puts it into each line that either of them logs about the request. It names nothing
else: KV blocks and cached prefixes have ids of our own.
"""

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
SAFE_ID = r"[A-Za-z0-9._:-]{1,128}"
"""What a client may call its request."""

current_request_id: ContextVar[str | None] = ContextVar("request id", default=None)
"""The id of the request that the running task belongs to."""

_safe_id = re.compile(SAFE_ID.encode())

Headers = Iterable[tuple[bytes, bytes]]


def request_id_of(headers: Headers) -> str:
    """Return the id that the headers give the request, or a new one if they give none, several or an unsafe one."""
    sent = [value for name, value in headers if name.lower() == HEADER]
    if len(sent) == 1 and _safe_id.fullmatch(sent[0]):
        return sent[0].decode()
    return f"req_{secrets.token_hex(16)}"


class RequestIds:
    """Middleware before Serve's own: gives each request its id, and each answer the same.

    Serve's own takes any id from the client, however long, and adds its header to answers that may have one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = HEADER, request_id_of(scope["headers"]).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*_without_id(message.get("headers", ())), header]}
            await send(message)

        await self._app({**scope, "headers": [*_without_id(scope["headers"]), header]}, receive, send_with_id)


def _without_id(headers: Headers) -> Headers:
    return (field for field in headers if field[0].lower() != HEADER)
