"""A small HTTP server in this process that answers as a test says."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Request(BaseHTTPRequestHandler):
    """One request; `body` holds what came with it."""

    body = b""

    def answer(self, status: int, content: bytes, *, length: int | None = None, **headers: str) -> None:
        """Answer; with a `length` longer than the content, the connection is cut in its middle."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""


@contextmanager
def stand_in(answer: Callable[[Request], None]) -> Iterator[str]:
    """Answer every request by a function; yield the address."""

    def handle(request: Request) -> None:
        request.body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        answer(request)

    handler = type("Handler", (Request,), {"do_GET": handle, "do_HEAD": handle, "do_POST": handle})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
