import pickle

from deployments.errors import INTERNAL, describe, error_body, headers_of, kind_of
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


def test_an_internal_error_keeps_its_secrets() -> None:
    kind, body = describe(ValueError("password"))
    assert kind is INTERNAL
    assert "password" not in str(body)


def test_what_cannot_be_encoded_is_escaped() -> None:
    assert error_body(INTERNAL, "x", "\ud800")["error"]["param"] == "\\ud800"


def test_an_error_may_say_when_to_come_again() -> None:
    error = QueueFullError("x")
    error.retry_after_s = 42
    error = pickle.loads(pickle.dumps(error))
    assert headers_of(kind_of(error), error) == {"Retry-After": "42"}
    assert headers_of(kind_of(error)) == headers_of(kind_of(TargetError("x")), TargetError("x")) == {"Retry-After": "1"}
