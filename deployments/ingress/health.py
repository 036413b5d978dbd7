"""The health routes: `/live` for whoever restarts processes, `/ready` for load balancers, `/health` for people.

None of them waits for anything: they say what this Ingress knows already.
"""

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from fastapi import FastAPI
from fastapi.responses import Response

from deployments.errors import ErrorBody, headers_of, kind_of
from deployments.ingress.readiness import Heard
from deployments.openai.fields import ResponseModel
from engine.errors import CapacityError

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 413, 431, 500)
}


class Status(ResponseModel):
    """The answer of `/live` and `/ready`."""

    status: Literal["ok"]


class RouterHealth(ResponseModel):
    """What one Router said of itself, `age_s` seconds ago; `reason` is why it is not ready."""

    replica: str
    ready: bool
    reason: str | None
    age_s: float


class Health(ResponseModel):
    """The answer of `/health`; `reason` is why no Router is ready."""

    status: Literal["ok", "unavailable"]
    live: bool
    ready: bool
    reason: str | None
    routers: list[RouterHealth]


def health_of(routers: Iterable[Heard], reason: str | None) -> Health:
    """Return the body of `/health`.

    Args:
        reason: why no Router is ready; None if one is.
    """
    is_ready = reason is None
    return Health(
        status="ok" if is_ready else "unavailable",
        live=True,
        ready=is_ready,
        reason=reason,
        routers=[
            RouterHealth(
                replica=heard.state.replica,
                ready=heard.state.problem is None,
                reason=heard.state.problem,
                age_s=round(heard.age_s, 3),
            )
            for heard in routers
        ],
    )


class HasHealth(Protocol):
    """What the routes call: an Ingress."""

    def health(self) -> Health:
        """Return what this Ingress knows."""
        ...


def add_health_routes(api: FastAPI, service: HasHealth) -> None:
    """Add `/live`, `/ready` and `/health`."""

    @api.head("/live", include_in_schema=False)
    @api.get("/live", response_model=None, responses={200: {"model": Status}, **_ERRORS})
    async def live() -> Response:
        """Return 200: this process answers."""
        return _response(Status(status="ok"))

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready", response_model=None, responses={200: {"model": Status}, 503: {"model": ErrorBody}, **_ERRORS})
    async def ready() -> Response:
        """Return 200 while a target can take rounds, 503 while all of them start, drain or recover."""
        health = service.health()
        if not health.ready:
            raise CapacityError(health.reason or "not ready")
        return _response(Status(status="ok"))

    @api.head("/health", include_in_schema=False)
    @api.get("/health", response_model=None, responses={200: {"model": Health}, 503: {"model": Health}, **_ERRORS})
    async def health() -> Response:
        """Return both, and the state of each Router; 503 where `/ready` is."""
        body = service.health()
        if body.ready:
            return _response(body)
        kind = kind_of(CapacityError())
        return _response(body, status=kind.status, headers=headers_of(kind))


def _response(body: ResponseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return Response(body.to_json(), status_code=status, media_type="application/json", headers=headers)
