"""The routes: a FastAPI application that calls a Service, and the form of every error response."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from deployments.config import AppConfig
from deployments.errors import (
    KINDS,
    ErrorBody,
    ErrorKind,
    describe,
    error_body,
    headers_of,
    kind_of_status,
    validation_message,
)
from deployments.ingress.admission import Admission
from deployments.ingress.answer import Answer
from deployments.ingress.body import Bodies, route_class
from deployments.ingress.health import HasHealth, add_health_routes
from deployments.ingress.middleware import Guard
from deployments.ingress.outline import Bounds
from deployments.ingress.server_info import ModelCard, ModelList, Version, installed_version
from deployments.ingress.tokenization import DetokenizeRequest, Text, TokenizeRequest, Tokens
from deployments.openai.chat import ChatCompletion, ChatCompletionRequest
from deployments.openai.completions import Completion, CompletionRequest
from deployments.openai.fields import ResponseModel
from deployments.openai.responses.body import Response as ResponseBody
from deployments.openai.responses.request import ResponsesRequest

_STREAM: dict[str, Any] = {"content": {"application/json": {}, "text/event-stream": {}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 429, 431, 500, 503)
}


class Service(HasHealth, Protocol):
    """What the routes call: an Ingress."""

    admission: Admission

    @property
    def device(self) -> str:
        """The `device` setting."""
        ...

    def bounds(self) -> Bounds:
        """Return how much a body may hold."""
        ...

    async def complete(self, request: CompletionRequest) -> Answer:
        """Return the answer to a completion request."""
        ...

    async def chat(self, request: ChatCompletionRequest) -> Answer:
        """Return the answer to a chat completion request."""
        ...

    async def respond(self, request: ResponsesRequest) -> Answer:
        """Return the answer to a responses request."""
        ...

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Return the token ids of a text or a conversation."""
        ...

    async def detokenize(self, request: DetokenizeRequest) -> Text:
        """Return the text of token ids."""
        ...

    async def models(self) -> ModelList:
        """Return the served model."""
        ...

    async def model(self, name: str) -> ModelCard:
        """Return the served model, if this is its name."""
        ...

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas."""
        ...


def make_api(service: Service, *, config: AppConfig, keys: Sequence[str]) -> FastAPI:
    """Return the HTTP application of one service."""
    # No redirects from `/path/` to `/path`: their address would be made of the Host header.
    api = FastAPI(title="Paceline", redoc_url=None, redirect_slashes=False)
    api.router.route_class = route_class(Bodies(service.bounds))
    _handle_errors(api)

    @api.post("/v1/completions", response_model=None, responses={200: {"model": Completion, **_STREAM}, **_ERRORS})
    async def completions(request: CompletionRequest) -> Response:
        """Continue a prompt."""
        return await _respond(await service.complete(request), bool(request.stream))

    @api.post(
        "/v1/chat/completions", response_model=None, responses={200: {"model": ChatCompletion, **_STREAM}, **_ERRORS}
    )
    async def chat_completions(request: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        return await _respond(await service.chat(request), bool(request.stream))

    @api.post("/v1/responses", response_model=None, responses={200: {"model": ResponseBody, **_STREAM}, **_ERRORS})
    async def responses(request: ResponsesRequest) -> Response:
        """Answer a conversation, in OpenAI's newer form."""
        return await _respond(await service.respond(request), bool(request.stream))

    @api.post("/tokenize", response_model=None, responses={200: {"model": Tokens}, **_ERRORS})
    async def tokenize(request: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation."""
        return _json(await service.tokenize(request))

    @api.post("/detokenize", response_model=None, responses={200: {"model": Text}, **_ERRORS})
    async def detokenize(request: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        return _json(await service.detokenize(request))

    @api.get("/v1/models", response_model=None, responses={200: {"model": ModelList}, **_ERRORS})
    async def models() -> Response:
        """List the served model."""
        return _json(await service.models())

    @api.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelCard}, **_ERRORS})
    async def model(name: str) -> Response:
        """Describe the served model."""
        return _json(await service.model(name))

    add_health_routes(api, service)

    @api.get("/version", response_model=None, responses={200: {"model": Version}, **_ERRORS})
    async def version() -> Response:
        """Return the server's version."""
        return _json(Version(version=installed_version(), device=service.device))

    @api.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Return Prometheus metrics of all replicas, each with its own label."""
        return Response(await service.metrics(), media_type=CONTENT_TYPE_LATEST)

    _document(api)
    api.add_middleware(Guard, limits=config.limits, api_keys=keys, admission=service.admission)
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
    """Remove FastAPI's own 422 from /openapi.json: validation errors are sent as 400."""
    generate = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            schema = generate()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
        return api.openapi_schema or {}

    api.openapi = openapi  # type: ignore[method-assign]


class EventStream(StreamingResponse):
    """Sends the events of an answer, and closes it however that ends."""

    def __init__(self, answer: Answer) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.events(), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answer.close()


async def _respond(answer: Answer, is_stream: bool) -> Response:
    try:
        if is_stream:
            await answer.start()
            return EventStream(answer)
        body = await answer.whole()
    except BaseException:
        await answer.close()
        raise
    await answer.close()
    return Response(body, media_type="application/json")


def _json(body: ResponseModel) -> Response:
    return Response(body.to_json(), media_type="application/json")


def _handle_errors(api: FastAPI) -> None:
    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        message, param = validation_message(error.errors(), error.body)
        return _error(ErrorKind(400, "invalid_request_error", None), error_body(kind_of_status(400), message, param))

    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        kind = kind_of_status(error.status_code)
        message = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
        return _error(kind, error_body(kind, message), error.headers)

    async def raised(_: Request, error: Exception) -> Response:
        kind, body = describe(error)
        return _error(kind, body, headers_of(kind, error))

    for error_class in KINDS:
        api.add_exception_handler(error_class, raised)
    api.add_exception_handler(Exception, raised)


def _error(kind: ErrorKind, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(body, status_code=kind.status, headers={**headers_of(kind), **(headers or {})})
