"""The health routes, answered from what this Ingress knows: `/live`, `/ready` and `/health`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from fastapi import FastAPI
from fastapi.responses import Response

from deployments.errors import headers_of, kind_of
from deployments.ingress.routes import answers, json_response
from deployments.openai.types import ResponseModel
from deployments.routing.loads import Heard
from engine.errors import CapacityError


class Status(ResponseModel):
    """The answer of `/live` and `/ready`."""

    status: Literal["ok"]


class Compiling(ResponseModel):
    """How far the compiling of a Router's models is; `left_s` is an estimate."""

    done: int
    of: int
    left_s: int


class RouterHealth(ResponseModel):
    """What one Router reported, `age_s` seconds ago; `reason` is why it is not ready."""

    replica: str
    ready: bool
    reason: str | None
    age_s: float
    compiling: Compiling | None = None


class Health(ResponseModel):
    """The answer of `/health`; `reason` is why no Router is ready."""

    status: Literal["ok", "unavailable"]
    live: bool
    ready: bool
    reason: str | None
    routers: list[RouterHealth]


def health_of(routers: Iterable[Heard], reason: str | None) -> Health:
    """Return the body of `/health`; `reason` is None if a Router is ready."""
    is_ready = reason is None
    return Health(
        status="ok" if is_ready else "unavailable",
        live=True,
        ready=is_ready,
        reason=reason,
        routers=list(map(_router_health, routers)),
    )


def _router_health(heard: Heard) -> RouterHealth:
    report, compiling = heard.report, {}
    if report.compiling is not None:
        done, of, left_s = report.compiling
        compiling = {"compiling": Compiling(done=done, of=of, left_s=round(left_s))}
    return RouterHealth(
        replica=report.router,
        ready=report.problem is None,
        reason=report.problem,
        age_s=round(heard.age_s, 3),
        **compiling,
    )


def add_health_routes(api: FastAPI, health_now: Callable[[], Health]) -> None:
    """Add `/live`, `/ready` and `/health`."""

    @api.head("/live", include_in_schema=False)
    @api.get("/live", response_model=None, responses=answers(Status))
    async def live() -> Response:
        """Return 200: this process answers."""
        return _response(Status(status="ok"))

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready", response_model=None, responses=answers(Status))
    async def ready() -> Response:
        """Return 200 while a target can take rounds, 503 while all of them start, drain or recover."""
        known = health_now()
        if not known.ready:
            raise CapacityError(known.reason or "not ready")
        return _response(Status(status="ok"))

    @api.head("/health", include_in_schema=False)
    @api.get("/health", response_model=None, responses={**answers(Health), 503: {"model": Health}})
    async def health() -> Response:
        """Return both, and the state of each Router; 503 where `/ready` is."""
        body = health_now()
        if body.ready:
            return _response(body)
        kind = kind_of(CapacityError())
        return _response(body, status=kind.status, headers=headers_of(kind))


def _response(body: ResponseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(body, status, {"Cache-Control": "no-store", **(headers or {})})
