"""`POST /demo/kill`: kills a process under running streams, to show that they survive; only with `page=demo`."""

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from deployments.openai.types import RequestModel
from engine.errors import CapacityError


class KillRequest(RequestModel):
    """The process to kill in every replica: the draft worker, the target's first rank, or the Router."""

    process: Literal["draft", "target", "router"]


def add_demo(api: FastAPI, kill: Callable[[str], Awaitable[bool]]) -> None:
    """Add the route; `kill` returns whether there was such a process."""

    @api.post("/demo/kill", response_model=None)
    async def kill_process(request: KillRequest) -> Response:
        """Kill a process with SIGKILL."""
        if not await kill(request.process):
            raise CapacityError(f"there is no {request.process} process now")
        return JSONResponse({"killed": request.process}, 202)
