"""Exceptions to HTTP: the table of status codes, and the form of every error body.

`{"error": {"message", "type", "param", "code"}}`, as OpenAI sends it, in a body or, after the first byte, in an event;
and `request_id` beside them, for those who keep the body alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.openai.fields import ResponseModel
from deployments.request_id import current_request_id
from engine.errors import (
    CapacityError,
    ConfigError,
    DrafterError,
    ModelError,
    ModelMismatchError,
    PacelineError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    TargetError,
    UnknownModelError,
)


class ErrorDetail(ResponseModel):
    """The error: a message for people, and a type, a field and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str | None = None


class ErrorBody(ResponseModel):
    """The body of every error."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """The status and body fields that a client gets for one class of exceptions."""

    status: int
    type: str
    code: str | None
    message: str | None = None
    """Replaces the exception's message if that is internal."""


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
    ConfigError: INTERNAL,
    ModelError: INTERNAL,
    ModelMismatchError: INTERNAL,
    DrafterError: INTERNAL,
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
    431: ErrorKind(431, "invalid_request_error", "headers_too_large"),
}


def kind_of(error: Exception) -> ErrorKind:
    """Return the kind of an exception: the entry of its nearest base class in `KINDS`."""
    for cls in type(error).__mro__:
        kind = KINDS.get(cast("type[Exception]", cls))
        if kind is not None:
            return kind
    return INTERNAL


def kind_of_status(status: int) -> ErrorKind:
    """Return the kind of a status that FastAPI or the middleware chose."""
    return _STATUS_KINDS.get(status, ErrorKind(status, "invalid_request_error", None))


def error_body(kind: ErrorKind, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the JSON body, with the id of the request that is being handled; lone surrogates are escaped."""

    def clean(text: str) -> str:
        return text.encode("utf-8", "backslashreplace").decode()

    request_id = current_request_id.get()
    return {
        "error": {
            "message": clean(kind.message or message),
            "type": kind.type,
            "param": None if param is None else clean(param),
            "code": kind.code,
            **({"request_id": request_id} if request_id else {}),
        }
    }


def describe(error: Exception) -> tuple[ErrorKind, dict[str, Any]]:
    """Return the kind of an exception, and the body to send."""
    kind = kind_of(error)
    param = error.param if isinstance(error, RequestError) else None
    return kind, error_body(kind, str(error), param)


def headers_of(kind: ErrorKind, error: Exception | None = None) -> dict[str, str]:
    """Return the headers that go with a kind of error; the exception may say when to come again."""
    if kind.status in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else CapacityError.retry_after_s
        return {"Retry-After": str(retry_after_s)}
    return {"WWW-Authenticate": "Bearer"} if kind.status == 401 else {}


def validation_message(errors: Sequence[Mapping[str, Any]], body: object) -> tuple[str, str | None]:
    """Return one message and one field's path for pydantic's errors about a body.

    A union has one error per branch. The deepest location is probably in the branch that the client meant; of equally
    deep ones, an error about the value says more than one about its type.
    """
    error = max(errors, key=lambda item: (len(item["loc"]), not item["type"].endswith("_type")))
    path = _path_in(body, error["loc"][1:])
    if error["type"] == "missing":
        path.append(str(error["loc"][-1]))
    tag = str(error["ctx"]["discriminator"]).strip("'") if error["type"].startswith("union_tag_") else ""
    if tag.isidentifier():  # a field, not a function
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
    """Return the parts of a location that are keys or positions in the body; the others name union branches."""
    path, node = [], body
    for part in loc:
        if (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        ):
            node = node[part]  # type: ignore[index]
        else:
            continue
        path.append(str(part))
    return path


def _short(value: object) -> str:
    text = repr(value[:80] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
