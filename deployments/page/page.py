"""The page at `/`: static files from this origin, which nothing else may script, style or frame."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response

from deployments.page.demo import Kill, add_demo

STATIC = Path(__file__).parent / "static"
FILES = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript", "rounds.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(api: FastAPI, page: Literal["on", "off", "demo"], kill: Kill) -> None:
    """Serve the page, unless it is off; a demo's page has buttons for `kill`."""
    for name, media_type in {} if page == "off" else FILES.items():
        body = (STATIC / (name or "page.html")).read_bytes().replace(b"<body", f'<body data-page="{page}"'.encode())
        api.add_route(f"/{name}", _file(body, media_type), include_in_schema=False)
    if page == "demo":
        add_demo(api, kill)


def _file(body: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'}

    async def answer(request: Request) -> Response:
        is_known = request.headers.get("If-None-Match") == headers["ETag"]
        return Response(b"" if is_known else body, 304 if is_known else 200, headers, media_type)

    return answer
