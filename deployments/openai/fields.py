"""The base classes and field types of requests and responses.

In a request, null means a field's default, also for fields that this server does not know; any other unknown field is
refused by name. Types are strict: a number in quotes is an error, as it is at OpenAI; but 4.0 is an integer, as JSON
Schema has it. The first wrong item of a list ends its validation. A field whose description begins with `Accepted and
ignored` is in the list in `deployments/README.md`.

In a response, fields without a default are always sent, null or not; a field with a default is left out unless it was
set.
"""

import json
from typing import Annotated, Any, Literal

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


def _check_unicode(text: str) -> str:
    """Refuse half a surrogate pair: JSON can hold it, but no tokenizer and no response can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair, which is not Unicode text") from None
    return text


def check_json(value: Any) -> Any:
    """Return parsed JSON if it can be written as JSON again.

    Raises:
        ValueError: it holds half a surrogate pair, or a number that is not finite, which Python's parser lets pass.
    """
    _check_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False))
    return value


def _integer_of(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise PydanticCustomError("int_type", "Input should be a valid integer")


class WholeNumber:
    """An annotation of `int`, after the bounds: 4.0 is accepted, too. Integers cost no call of Python."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of an integer, or else of a float without a fraction."""
        integer = handler(source)
        from_float = core_schema.chain_schema([core_schema.no_info_plain_validator_function(_integer_of), integer])
        return core_schema.union_schema([integer, from_float], mode="left_to_right")

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the integer."""
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


WHOLE = WholeNumber()
OnlyFalse = Annotated[Literal[False], BeforeValidator(_check_boolean)]
Text = Annotated[str, AfterValidator(_check_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
StopString = Annotated[Text, Field(min_length=1)]
Salt = Annotated[Text, Field(min_length=1, max_length=256)]
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
        for part in schema:
            _stop_at_first_error(part)


class RequestModel(BaseModel):
    """A JSON object from a client."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra=_allow_null_extras,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that pydantic makes, in which the first wrong item of a list is its only error."""
        schema = handler(source)
        _stop_at_first_error(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key in cls.model_fields}


class ResponseModel(BaseModel):
    """A JSON object for a client."""

    def to_json(self) -> str:
        """Return the JSON text."""
        return self.model_dump_json(exclude_unset=True)
