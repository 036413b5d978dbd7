"""What Serve's HTTP proxy does before it handles a request: it drops headers, and has the body travel along.

Some headers are orders to the proxy itself: by them a client can switch off its deadline and its disconnect detection,
and name its request. And the proxy sends a replica the head of a request only; the replica comes back for the body by a
Ray call, which takes milliseconds.

The proxy loads this where Ray starts with the variable
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.ingress.proxy:middlewares`.
Without it all works alike, but for these two.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SERVE_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"x-request-id"})
EARLY_BODY = "paceline.body"
"""Where `scope["extensions"]` has a body that travels with its head."""
MAX_EARLY_BYTES = 2**16
"""Of a body that does. The proxy holds two more of it for as long as it is answered; up to 100 KiB, Ray sends a call's
arguments along with the call."""


class DropServeHeaders:
    """Passes requests on without them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            headers = [(name, value) for name, value in scope["headers"] if name.lower() not in SERVE_HEADERS]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


class SendBodyEarly:
    """Passes requests on with their bodies in the scope, where those are announced and small.

    They can be received all the same, as ever. Until such a body has come, Serve does not know of the request: it has
    no slot of the Ingress yet, and its time does not run.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or not 0 < _announced_bytes(scope) <= MAX_EARLY_BYTES:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        if messages[-1]["type"] == "http.request":  # else the client left before it had sent it all
            body = b"".join(message.get("body", b"") for message in messages)
            scope = {**scope, "extensions": {**(scope.get("extensions") or {}), EARLY_BODY: body}}
        pending = iter(messages)

        async def replay() -> Message:
            message = next(pending, None)
            return await receive() if message is None else message

        await self._app(scope, replay, send)


def middlewares() -> list[Middleware]:
    """Return what the proxy puts before itself."""
    return [Middleware(DropServeHeaders), Middleware(SendBodyEarly)]


def _announced_bytes(scope: Scope) -> int:
    """Return the length of a request's body as its head has it; 0 where it does not tell, or not in one way only."""
    names = (b"content-length", b"transfer-encoding")
    told = [(name.lower(), value) for name, value in scope["headers"] if name.lower() in names]
    match told:
        case [(b"content-length", value)] if value.isdigit() and len(value) <= len(str(MAX_EARLY_BYTES)):
            return int(value)
    return 0
