"""The page at `/`: static files from this origin, which nothing else may script, style or frame."""

import hashlib
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

STATIC = Path(__file__).parent / "static"
FILES = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript", "rounds.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(api: FastAPI, page: str) -> None:
    """Serve the page, with the buttons of a demo if `page` is demo."""
    for name, media_type in FILES.items():
        body = (STATIC / (name or "page.html")).read_bytes().replace(b"<body", f'<body data-page="{page}"'.encode())
        headers = {**HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
        answer = partial(_answer, body=body, headers=headers, media_type=media_type)
        api.add_route(f"/{name}", answer, include_in_schema=False)


async def _answer(request: Request, *, body: bytes, headers: dict[str, str], media_type: str) -> Response:
    is_known = request.headers.get("If-None-Match") == headers["ETag"]
    return Response(b"" if is_known else body, 304 if is_known else 200, headers, media_type)
