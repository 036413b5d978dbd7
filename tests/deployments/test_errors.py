import contextvars
import pickle

from deployments.errors import INTERNAL, KINDS, describe, error_body, headers_of, kind_of, kind_of_status, set_request
from engine.errors import PacelineError, QueueFullError, RequestError, TargetError


def tree(cls: type[PacelineError]) -> list[type[PacelineError]]:
    return [cls, *(subclass for child in cls.__subclasses__() for subclass in tree(child))]


def test_only_errors_that_no_client_causes_or_waits_for_are_internal() -> None:
    errors = [cls for cls in tree(PacelineError) if cls.__module__ == "engine.errors"]
    internal = {cls.__name__ for cls in errors if kind_of(cls("x")) is INTERNAL}
    assert internal == {"PacelineError", "ConfigError", "ModelError", "ModelMismatchError", "DrafterError"}


def test_a_subclass_made_by_ray_counts_as_what_it_wraps() -> None:
    wrapper = type("RayTaskError(QueueFullError)", (QueueFullError,), {})
    assert kind_of(wrapper("x")).status == 429


def test_the_field_is_named_also_after_a_journey_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RequestError("n is 9, at most 8 are allowed", "n")))
    _, body = describe(error)
    assert body["error"] == {
        "message": "n is 9, at most 8 are allowed",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }


def test_what_cannot_be_encoded_is_escaped() -> None:
    assert error_body(INTERNAL, "x", "\ud800")["error"]["param"] == "\\ud800"


def test_errors_of_messages_have_anthropics_form() -> None:
    context = contextvars.copy_context()
    context.run(set_request, "req_1", "/v1/messages/count_tokens")
    assert context.run(error_body, INTERNAL, "x", "n") == {
        "type": "error",
        "error": {"type": "api_error", "message": "internal error"},
        "request_id": "req_1",
    }
    kinds = [*KINDS.values(), *map(kind_of_status, (401, 404, 405, 408, 413, 431))]
    assert {kind.status: context.run(error_body, kind, "x")["error"]["type"] for kind in kinds} == {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        431: "invalid_request_error",
        500: "api_error",
        503: "overloaded_error",
    }
    context.run(set_request, "req_2", "/v1/completions")
    assert context.run(error_body, INTERNAL, "x", "n")["error"]["request_id"] == "req_2"


def test_an_error_may_say_when_to_come_again() -> None:
    error = QueueFullError("x")
    error.retry_after_s = 42
    error = pickle.loads(pickle.dumps(error))
    assert headers_of(kind_of(error), error) == {"Retry-After": "42"}
    assert headers_of(kind_of(error)) == headers_of(kind_of(TargetError("x")), TargetError("x")) == {"Retry-After": "1"}
