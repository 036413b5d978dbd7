"""`POST /demo/kill`: kills a process under running streams, to show that they survive; only with `page=demo`."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from deployments.openai.types import RequestModel
from engine.errors import CapacityError

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class KillRequest(RequestModel):
    """The process to kill in every replica: the draft worker, the target's first rank, or the Router."""

    process: Literal["draft", "target", "router"]


def add_demo(api: FastAPI, kill: Callable[[str], Awaitable[bool]], *, has_keys: bool) -> None:
    """Add the route; `kill` returns whether there was such a process."""

    @api.post("/demo/kill", response_model=None)
    async def kill_process(
        request: KillRequest, http: Request, host: Annotated[str, Header()] = "", origin: Annotated[str, Header()] = ""
    ) -> Response:
        """Kill a process with SIGKILL."""
        # A page of another site reaches this server through a browser; a program elsewhere may send any Host.
        client = http.client.host if http.client else ""
        is_here = has_keys or (client in LOOPBACK and urlsplit(f"//{host}").hostname in LOOPBACK)
        if not is_here or (origin and urlsplit(origin).netloc != host):
            raise HTTPException(403, "without api_keys, only the page at 127.0.0.1 or localhost may kill")
        if not await kill(request.process):
            raise CapacityError(f"there is no {request.process} process now")
        return JSONResponse({"killed": request.process}, 202)
