"""The routes: a FastAPI application over an Ingress, and what every error looks like on the way out."""

import functools
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from deployments.config import Limits
from deployments.errors import KINDS, ErrorKind, describe, error_body, headers_of, kind_of_status, validation_message
from deployments.ingress.middleware import Guard
from deployments.openai import bodies as r
from deployments.openai.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deployments.openai.responses import Response as Body
from deployments.openai.responses import ResponsesRequest

if TYPE_CHECKING:
    from deployments.ingress.answer import Answer
    from deployments.ingress.ingress import Ingress

_STREAM: dict[str, Any] = {"content": {"application/json": {}, "text/event-stream": {}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": r.ErrorBody} for status in (400, 401, 404, 405, 408, 413, 429, 431, 500, 503)
}


def make_api(ingress: "Ingress", *, limits: Limits, keys: Sequence[str]) -> FastAPI:
    """Return the HTTP application of one Ingress."""
    api = FastAPI(title="Paceline", redoc_url=None)
    _handle_errors(api)

    @api.post("/v1/completions", response_model=None, responses={200: {"model": r.Completion, **_STREAM}, **_ERRORS})
    async def completions(request: CompletionRequest) -> Response:
        """Continue a prompt."""
        return await _respond(await ingress.complete(request), bool(request.stream))

    @api.post(
        "/v1/chat/completions", response_model=None, responses={200: {"model": r.ChatCompletion, **_STREAM}, **_ERRORS}
    )
    async def chat_completions(request: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        return await _respond(await ingress.chat(request), bool(request.stream))

    @api.post("/v1/responses", response_model=None, responses={200: {"model": Body, **_STREAM}, **_ERRORS})
    async def responses(request: ResponsesRequest) -> Response:
        """Answer a conversation, in OpenAI's newer shape."""
        return await _respond(await ingress.respond(request), bool(request.stream))

    @api.post("/tokenize", response_model=None, responses={200: {"model": r.Tokens}, **_ERRORS})
    async def tokenize(request: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation."""
        return _json(await ingress.tokenize(request))

    @api.post("/detokenize", response_model=None, responses={200: {"model": r.Text}, **_ERRORS})
    async def detokenize(request: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        return _json(await ingress.detokenize(request))

    @api.get("/v1/models", response_model=None, responses={200: {"model": r.ModelList}, **_ERRORS})
    async def models() -> Response:
        """List the served model."""
        return _json(await ingress.models())

    @api.get("/health", response_model=None, responses={200: {"model": r.Health}, **_ERRORS})
    async def health() -> Response:
        """Return 200 while rounds are being finished, 503 otherwise."""
        await ingress.check()
        return _json(r.Health(status="ok"))

    @api.get("/ready", response_model=None, responses={200: {"model": r.Health}, **_ERRORS})
    async def ready() -> Response:
        """Return 200 when models are loaded and requests are taken."""
        await ingress.check()
        return _json(r.Health(status="ok"))

    @api.get("/version", response_model=None, responses={200: {"model": r.Version}, **_ERRORS})
    async def version() -> Response:
        """Return the server's version."""
        return _json(r.Version(version=_installed_version()))

    @api.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Return Prometheus metrics, summed over all replicas."""
        return Response(await ingress.metrics(), media_type=CONTENT_TYPE_LATEST)

    _document(api)
    api.add_middleware(Guard, limits=limits, api_keys=keys)
    return api


def _document(api: FastAPI) -> None:
    """Have /openapi.json say what is sent: validation errors are 400, never FastAPI's own 422."""
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


@functools.cache
def _installed_version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout that was not installed


async def _respond(answer: "Answer", is_stream: bool) -> Response:
    if not is_stream:
        return Response(await answer.whole(), media_type="application/json")
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(await answer.events(), media_type="text/event-stream", headers=headers)


def _json(body: r.ResponseModel) -> Response:
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
        return _error(*describe(error))

    for known in KINDS:
        api.add_exception_handler(known, raised)
    api.add_exception_handler(Exception, raised)


def _error(kind: ErrorKind, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(body, status_code=kind.status, headers={**headers_of(kind), **(headers or {})})
