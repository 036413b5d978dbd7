"""What Serve's HTTP proxy does before it reads a request: it drops the headers that are orders to itself.

By them a client can switch off its deadline and its disconnect detection, and name its request. The proxy loads this by
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.proxy:middlewares`, which must be set where Ray starts.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

SERVE_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"x-request-id"})


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


def middlewares() -> list[Middleware]:
    """Return what the proxy puts before itself."""
    return [Middleware(DropServeHeaders)]
