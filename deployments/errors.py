"""Exceptions to HTTP: the table of status codes, and the form of every error body.

`{"error": {"message", "type", "param", "code", "request_id"}}`: OpenAI's fields and the request's id, in a body or,
after the first byte, in an event. On Anthropic's routes it is `{"type", "error": {"type", "message"}, "request_id"}`.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.exceptions import HTTPException

from engine.errors import (
    CapacityError,
    PacelineError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    TargetError,
    UnknownModelError,
)

current_request_id: ContextVar[str | None] = ContextVar("request id", default=None)
_is_anthropic: ContextVar[bool] = ContextVar("request in Anthropic's form", default=False)
_ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class ShutdownError(CapacityError):
    """The server is shutting down, and the time to finish requests is over."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """The status and body fields that a client gets for one class of exceptions."""

    status: int
    type: str
    code: str | None
    message: str | None = None  # replaces the exception's message if that is not for clients


INTERNAL = ErrorKind(500, "server_error", "internal_error", "internal error")
_UNAVAILABLE = ErrorKind(503, "server_error", "unavailable")
_RESTARTING = ErrorKind(503, "server_error", "unavailable", "a worker was lost; try again")

KINDS: Mapping[type[Exception], ErrorKind] = {
    PacelineError: INTERNAL,
    RequestError: ErrorKind(400, "invalid_request_error", None),
    PromptTooLongError: ErrorKind(400, "invalid_request_error", "context_length_exceeded"),
    UnknownModelError: ErrorKind(404, "invalid_request_error", "model_not_found"),
    CapacityError: _UNAVAILABLE,
    QueueFullError: ErrorKind(429, "rate_limit_error", "queue_full"),
    TargetError: _UNAVAILABLE,
    TimeoutError: ErrorKind(408, "timeout_error", "deadline_exceeded"),
    BackPressureError: ErrorKind(429, "rate_limit_error", "queue_full", "the queue is full"),
    DeploymentUnavailableError: _RESTARTING,
    RayActorError: _RESTARTING,
}

_STATUS_KINDS: Mapping[int, ErrorKind] = {
    401: ErrorKind(401, "authentication_error", "invalid_api_key"),
    408: ErrorKind(408, "timeout_error", "body_timeout"),
    404: ErrorKind(404, "invalid_request_error", "route_not_found"),
    405: ErrorKind(405, "invalid_request_error", "method_not_allowed"),
    413: ErrorKind(413, "invalid_request_error", "body_too_large"),
    415: ErrorKind(415, "invalid_request_error", "unsupported_media_type"),
    431: ErrorKind(431, "invalid_request_error", "headers_too_large"),
}


def kind_of(error: Exception) -> ErrorKind:
    """Return the `KINDS` entry of an exception's nearest base class, or of an HTTPException's status."""
    if isinstance(error, HTTPException):
        return kind_of_status(error.status_code)
    for cls in type(error).__mro__:
        kind = KINDS.get(cast("type[Exception]", cls))
        if kind is not None:
            return kind
    return INTERNAL


def kind_of_status(status: int) -> ErrorKind:
    """Return the kind of a status that FastAPI or the middleware chose."""
    return _STATUS_KINDS.get(status, ErrorKind(status, "invalid_request_error", None))


def set_request(request_id: str, path: str) -> None:
    """Set the id of the running task's HTTP request, and the form of its errors, by its path."""
    current_request_id.set(request_id)
    _is_anthropic.set(path.startswith("/v1/messages"))


def error_body(kind: ErrorKind, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the JSON body, with the current request's id; lone surrogates are escaped."""

    def clean(text: str) -> str:
        return text.encode("utf-8", "backslashreplace").decode()

    request_id = current_request_id.get()
    id_field = {"request_id": request_id} if request_id else {}
    text = clean(kind.message or message)
    if _is_anthropic.get():
        error_type = _ANTHROPIC_TYPES.get(kind.status, kind.type)
        return {"type": "error", "error": {"type": error_type, "message": text}, **id_field}
    field = None if param is None else clean(param)
    return {"error": {"message": text, "type": kind.type, "param": field, "code": kind.code, **id_field}}


def describe(error: Exception) -> tuple[ErrorKind, dict[str, Any]]:
    """Return the kind of an exception, and the body to send."""
    kind = kind_of(error)
    param = error.param if isinstance(error, RequestError) else None
    return kind, error_body(kind, error.detail if isinstance(error, HTTPException) else str(error), param)


def headers_of(kind: ErrorKind, error: Exception | None = None) -> dict[str, str]:
    """Return an error's headers: an HTTPException's own, Retry-After for 429 and 503, WWW-Authenticate for 401."""
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if kind.status in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else CapacityError.retry_after_s
        return {"Retry-After": str(retry_after_s), **headers}
    return {"WWW-Authenticate": "Bearer", **headers} if kind.status == 401 else headers


def validation_message(errors: Sequence[Mapping[str, Any]], body: object) -> tuple[str, str | None]:
    """Return a message and a field's path for pydantic's errors about a body.

    A union has an error per branch. The client probably meant the branch whose list is too long, else the branch with
    the deepest error; at equal depth, an error about a value says more than an error about a type.
    """
    error = max(
        errors, key=lambda item: (item["type"] == "too_long", len(item["loc"]), not item["type"].endswith("_type"))
    )
    path = _path_in(body, error["loc"][1:])
    if error["type"] == "missing":
        path.append(str(error["loc"][-1]))
    tag = str(error["ctx"]["discriminator"]).strip("'") if error["type"].startswith("union_tag_") else ""
    if tag.isidentifier():  # a field's name; a discriminator function has another form
        path.append(tag)
    param = ".".join(path) or None
    if error["type"] == "extra_forbidden":
        return f"{param} is not a field of this request, or is not supported", param
    if tag.isidentifier() and error["type"] == "union_tag_invalid":
        return f"{param} is {_short(error['ctx']['tag'])}; it must be one of {error['ctx']['expected_tags']}", param
    if tag.isidentifier():
        return f"{param}: Field required", param
    if param is None or error["type"] == "missing":
        return f"{param or 'body'}: {error['msg']}", param
    return f"{param} is {_short(error['input'])}: {error['msg']}", param


def _path_in(body: object, loc: Sequence[str | int]) -> list[str]:
    """Keep the keys and positions of a location that are in the body; its other entries name union branches."""
    path, node = [], body
    for key in loc:
        if (isinstance(node, dict) and key in node) or (
            isinstance(node, list) and isinstance(key, int) and key < len(node)
        ):
            node = node[key]  # type: ignore[index]
        else:
            continue
        path.append(str(key))
    return path


def _short(value: object) -> str:
    text = repr(value[:80] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
