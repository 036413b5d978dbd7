"""`POST /demo/kill`: kills a process under running streams, to show that they survive; only with `page=demo`."""

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from deployments.openai.types import RequestModel
from engine.errors import CapacityError

Kill = Callable[[str], Awaitable[bool]]
"""Kills a process of this name in every replica; returns whether there was any."""


class KillRequest(RequestModel):
    """The body of /demo/kill."""

    process: Literal["draft", "target", "router"]
    """The process to kill: the draft worker, the target's first rank, or the Router."""


def add_demo(api: FastAPI, kill: Kill) -> None:
    """Add the route."""

    @api.post("/demo/kill", response_model=None)
    async def kill_process(request: KillRequest) -> Response:
        """Kill a process of every replica with SIGKILL."""
        if not await kill(request.process):
            raise CapacityError(f"there is no {request.process} process now")
        return JSONResponse({"killed": request.process}, 202)
