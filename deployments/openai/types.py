"""The base classes and field types of requests and responses.

In a request, null means a field's default, also for unknown fields; any other unknown field is refused by name. Types
are strict, as at OpenAI: a number in quotes is an error, but 4.0 is an integer, as in JSON Schema. The first wrong
item of a list ends its validation. Fields described as `Accepted and ignored` are listed in `deployments/README.md`.
Limits of a single field are in its type.

In a response, fields without a default are always sent, null or not; others only if set.
"""

import json
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_KEYS = 1024
"""Keys of one object: each unknown one is an error, which takes 10 microseconds."""


def _check_finite(value: Any) -> Any:
    """Refuse NaN and infinity, which the parser accepts so that errors can name the field."""
    json.dumps(value, allow_nan=False)
    return value


class WholeNumber:
    """An annotation of `int`, after the bounds: 4.0 is accepted, too, without a call of Python."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        integer = handler(source)
        from_float = core_schema.chain_schema([core_schema.float_schema(strict=True), {**integer, "strict": False}])
        return core_schema.union_schema([integer, from_float], mode="left_to_right")

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema["choices"][0])


def refused(reason: str) -> BeforeValidator:
    """Return an annotation of `None`: a field that is refused by name with a reason, unless it is null."""

    def check(value: object) -> None:
        if value is not None:
            raise PydanticCustomError("refused", "{reason}", {"reason": reason})

    return BeforeValidator(check)


def _check_boolean(value: object) -> object:
    """Refuse 0, which equals false for Python."""
    if value is not None and not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


def at_most(num_keys: int) -> BeforeValidator:
    """Return an annotation of `dict` that counts the keys before it looks at the values, unlike `max_length`."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > num_keys:
            counts = {"number": f"{len(value):,}", "limit": f"{num_keys:,}"}
            raise PydanticCustomError("too_long", "it has {number} entries, at most {limit} are allowed", counts)
        return value

    return BeforeValidator(check, json_schema_input_type=Any)


WHOLE = WholeNumber()
OnlyFalse = Annotated[Literal[False], BeforeValidator(_check_boolean)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_finite)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
StopString = Annotated[str, Field(min_length=1, max_length=64)]
NumAlternatives = Annotated[int, Field(ge=0, le=20), WHOLE]
"""How many of the most likely tokens to list with their log probabilities."""
Salt = Annotated[str, Field(min_length=1, max_length=256)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE]


def _allow_null_extras(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = {"type": "null"}


def _stop_at_first_error(schema: Any) -> None:
    """Make every list in a schema end its validation at the first wrong item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            _stop_at_first_error(item)


class RequestModel(BaseModel):
    """A JSON object from a client."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_extra=_allow_null_extras
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema, with the first wrong item of a list as its only error."""
        schema = handler(source)
        _stop_at_first_error(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_KEYS:
            raise PydanticCustomError("too_long", f"it has {len(data):,} fields, at most {MAX_KEYS:,} are allowed")
        return {key: value for key, value in data.items() if value is not None or key in cls.model_fields}


class Cacheable(RequestModel):
    """What a client may ask to be cached."""

    cache_control: dict[str, Any] | None = None
    """Accepted and ignored: prefixes stay cached until their room is needed."""


class ResponseModel(BaseModel):
    """A JSON object for a client."""


def to_json(body: object) -> str:
    """Return the JSON text of a response, or of fields whose values are complete."""
    if isinstance(body, ResponseModel):
        return body.model_dump_json(exclude_unset=True)
    return pydantic_core.to_json(body, inf_nan_mode="null").decode()


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
