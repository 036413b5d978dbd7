"""Bodies: parses the bytes of requests, so that no body delays the others."""

import asyncio
import codecs
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestError

MAX_VALUES = 2**16
"""Strings (also keys), lists and objects in one body; with so many, 1 MiB takes at most 30 ms to parse and validate."""
SMALL_BYTES = 16 * 2**10
"""A body of this size takes about a millisecond, whatever it holds."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # an unterminated string is read once, to the end


def check_size(json_text: bytes, what: str, field: str | None = None) -> None:
    """Raise RequestError for JSON with too many values, before it is parsed; takes about 10 ms for 1 MiB."""
    bare, num_values = _STRING.subn(b"", json_text, MAX_VALUES + 1)
    num_values += bare.count(b"[") + bare.count(b"{")
    if num_values > MAX_VALUES:
        raise RequestError(f"{what} has more than {MAX_VALUES:,} strings, lists and objects, the most allowed", field)


class Bodies:
    """Parses bodies of one Ingress: large bodies one at a time, with pauses that leave half of the time to others."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def parse(self, body: bytes) -> Any:
        """Return the value in a body; raise RequestError if it is not JSON in UTF-8, or has too many values."""
        if len(body) <= SMALL_BYTES:
            return _parse(body)
        await self._turn.acquire()
        started = time.perf_counter()
        try:
            return _parse(body)
        finally:
            asyncio.get_running_loop().call_later(time.perf_counter() - started, self._turn.release)


def _check_media_type(headers: Mapping[str, str]) -> None:
    """Refuse with 415 a body that FastAPI would take for bytes."""
    sent, encoding = headers.get("content-type", "missing"), headers.get("content-encoding", "identity")
    if not re.fullmatch(r"application/([^;]+\+)?json", sent.partition(";")[0].strip().lower()):
        raise HTTPException(415, f"content-type is {sent[:80]}; send JSON, with 'Content-Type: application/json'")
    if encoding.lower() != "identity":
        raise HTTPException(415, f"content-encoding is {encoding[:80]}; send the body as it is, without the header")


def _parse(body: bytes) -> Any:
    check_size(body, "the body")
    try:
        return from_json(body.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def route_class(bodies: Bodies) -> type[APIRoute]:
    """Return a FastAPI route class that parses with `bodies`."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle

            async def parse_first(request: Request) -> Response:
                if body := await request.body():
                    _check_media_type(request.headers)
                    request._json = await bodies.parse(body)  # where `request.json()` looks first
                return await handle(request)

            return parse_first

    return BodyRoute
