"""Bodies: from the bytes of a request to JSON values, so that no body holds the others up.

A body is measured (`outline.py`) before it is parsed. Large ones are parsed one at a time, and after each the next one
waits for as long as it took: at least half of the time is left to the streams, the health routes and small bodies.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.outline import Bounds, Outline
from engine.errors import RequestError

SMALL_BYTES = 16 * 2**10
"""A body of this size takes about a millisecond, whatever it holds."""


class Bodies:
    """Parses the bodies of one Ingress."""

    def __init__(self, bounds: Callable[[], Bounds]) -> None:
        """Parse nothing yet.

        Args:
            bounds: returns how much a body may hold now.
        """
        self._bounds = bounds
        self._turn = asyncio.Lock()

    async def parse(self, body: bytes) -> Any:
        """Return what a body says.

        Raises:
            RequestError: it is not JSON, or holds too much; names the field and the limit.
        """
        outline = Outline(body, self._bounds())
        if len(body) <= SMALL_BYTES:
            for _ in outline.read():
                pass
            return _from_json(body)
        await self._turn.acquire()
        started = time.perf_counter()
        try:
            for _ in outline.read():
                await asyncio.sleep(0)
            return _from_json(body)
        finally:
            asyncio.get_running_loop().call_later(time.perf_counter() - started, self._turn.release)


def _from_json(body: bytes) -> Any:
    """Return the values of a body, which is UTF-8: in another encoding it could not have been measured."""
    try:
        return json.loads(body.decode("utf-8-sig"))
    except ValueError:
        raise RequestError("the body is not valid JSON") from None


class ParsedRequest(Request):
    """A request whose body has been parsed."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._bytes = body
        self._value = value

    async def body(self) -> bytes:
        """Return the body."""
        return self._bytes

    async def json(self) -> Any:
        """Return what the body says."""
        return self._value


def route_class(bodies: Bodies) -> type[APIRoute]:
    """Return FastAPI's class of routes, with these bodies in place of its own parser."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle

            async def parse_first(request: Request) -> Response:
                body = await request.body()
                value = await bodies.parse(body) if body else None
                return await handle(ParsedRequest(request, body, value))

            return parse_first

    return BodyRoute
