"""The HTTP application around the routes: the Guard, CORS, how bodies are parsed, and the form of every error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from deployments.anthropic.messages_writer import MessagesError
from deployments.errors import KINDS, ErrorKind, describe, error_body, headers_of, kind_of_status, validation_message
from deployments.guard.admission import GENERATING_ROUTES, PREPARATION, Admission, Preparation
from deployments.guard.body import Bodies, route_class
from deployments.guard.middleware import Guard
from deployments.ingress.event_ids import LastEventId
from deployments.observe.tracing import TracedRequests, make_tracer
from deployments.openai.types import ErrorBody, ResponseModel, to_json
from deployments.sections import IngressConfig

REFUSALS = (400, 401, 404, 405, 408, 413, 415, 429, 431, 500, 503)
REFERENCE = "#/components/schemas/{model}"


def answers(
    model: type[ResponseModel], *, streams: bool = False, error: type[ResponseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """Return what /openapi.json says of a route that answers with a `model`, with events or with an `error`."""
    content: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    # By reference: FastAPI would build a validator for each status of each route, which takes too long.
    refused = {"content": {"application/json": {"schema": {"$ref": REFERENCE.format(model=error.__name__)}}}}
    return {200: {"model": model, **({"content": content} if streams else {})}, **dict.fromkeys(REFUSALS, refused)}


@dataclass(frozen=True, slots=True)
class Arrival:
    """What comes with the body of a generating request."""

    preparation: Preparation
    last_event_id: str | None


async def _arrival(request: Request, last_event_id: LastEventId = None) -> Arrival:
    return Arrival(request.scope[PREPARATION], last_event_id)


Arrived = Annotated[Arrival, Depends(_arrival)]


def json_response(body: ResponseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a body as a response."""
    return Response(to_json(body), status, headers, "application/json")


def make_api(config: IngressConfig, keys: Sequence[str], admission: Admission) -> FastAPI:
    """Return an HTTP application without routes."""
    # No redirects from `/path/` to `/path`: their address would be made of the Host header.
    api = FastAPI(title="Paceline", redoc_url=None, redirect_slashes=False)
    api.router.route_class = route_class(Bodies())
    _handle_errors(api, admission)
    _document(api)
    api.add_middleware(Guard, limits=config.limits, api_keys=keys, admission=admission)
    if (tracer := make_tracer()) is not None:  # around the Guard, so that refusals are traced, too
        api.add_middleware(TracedRequests, tracer=tracer, routes=GENERATING_ROUTES)
    if config.cors_allow_origins:  # around the Guard, because a browser asks for leave without a key
        api.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return api


def _document(api: FastAPI) -> None:
    """Describe errors in /openapi.json as they are sent: in the server's form, and with 400 for FastAPI's 422."""
    generate = api.openapi
    _, definitions = models_json_schema(
        [(ErrorBody, "serialization"), (MessagesError, "serialization")], ref_template=REFERENCE
    )

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            schema = generate()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            schema["components"]["schemas"] |= definitions["$defs"]
        return api.openapi_schema or {}

    api.openapi = openapi  # type: ignore[method-assign]


def _handle_errors(api: FastAPI, admission: Admission) -> None:
    def answer(request: Request, kind: ErrorKind, body: dict[str, Any], error: Exception) -> Response:
        if admission.is_preparing(request.scope.get(PREPARATION)):
            admission.count_refusal(kind)
        return JSONResponse(body, kind.status, headers_of(kind, error))

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        kind = kind_of_status(400)
        return answer(request, kind, error_body(kind, *validation_message(error.errors(), error.body)), error)

    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        error.detail = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
        return answer(request, *describe(error), error)

    async def raised(request: Request, error: Exception) -> Response:
        return answer(request, *describe(error), error)

    for error_class in KINDS:
        api.add_exception_handler(error_class, raised)
    api.add_exception_handler(Exception, raised)
