"""Middleware for Serve's HTTP servers: request ids, and no headers by which a client could give Serve orders.

With those headers a client can switch off its deadline and its disconnect detection. Serve
loads the middleware where Ray starts with the variables of `deployments/environment.py`: in its own proxy, and, where
HAProxy is the proxy, before the Ingress.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.request_id import RequestIds

SERVE_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})


class DropServeHeaders:
    """Passes requests on without Serve's own headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            headers = [(name, value) for name, value in scope["headers"] if name.lower() not in SERVE_HEADERS]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return the middlewares that the proxy puts before itself."""
    return [Middleware(DropServeHeaders), Middleware(RequestIds)]
