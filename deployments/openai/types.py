"""The base classes and field types of requests and responses.

In a request, null means a field's default, also for unknown fields; any other unknown field is refused by name. Types
are strict, as at OpenAI: a number in quotes is an error, but 4.0 is an integer, as in JSON Schema. The first wrong
item of a list ends its validation. Limits of a single field are in its type.

In a response, fields without a default are always sent, null or not; others only if set.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

IGNORED: dict[str, dict[str, str]] = {
    "prefixes stay cached until their room is needed": {
        "cache_control": "TextPart Message Tool ToolResultBlock ToolUseBlock CustomTool CountTokensRequest",
        "prompt_cache_retention prompt_cache_options": "SamplingRequest",
    },
    "equal prefixes are found without it; `cache_salt` keeps requests from sharing them": {
        "prompt_cache_key": "SamplingRequest"
    },
    "it cannot change the text": {
        "user safety_identifier": "SamplingRequest",
        "metadata": "SamplingRequest MessagesRequest Message",
        "agent model timestamp usage messageId traceId": "Message",
        "caller": "ToolUseBlock",
    },
    "only false, which asks for nothing": {
        "early_stopping echo return_tokens_as_token_ids use_beam_search": "SamplingRequest",
        "include_obfuscation": "EventOptions",
        "background": "ResponsesRequest",
    },
    "only true, which asks for nothing": {"include_reasoning spaces_between_special_tokens": "SamplingRequest"},
    "only 1, which asks for nothing": {"best_of length_penalty": "SamplingRequest"},
    'only "none", which asks for nothing': {"function_call": "SamplingRequest"},
    'only "", which asks for nothing': {"suffix": "CompletionRequest"},
    'only "disabled", which asks for nothing': {"truncation": "ResponsesRequest"},
    'only ["text"], which asks for nothing': {"modalities": "ChatCompletionRequest"},
    "only [], which asks for nothing": {
        "bad_words documents functions": "SamplingRequest",
        "images": "AssistantMessage",
        "mcp_servers": "MessagesRequest",
    },
    "there is one tier": {"service_tier": "SamplingRequest MessagesRequest", "inference_geo speed": "MessagesRequest"},
    "nothing is stored": {"store": "SamplingRequest"},
    "the model sees the conversation only": {"description": "JsonSchema", "input_examples": "CustomTool"},
    "required calls and answers match their schema, others need not": {"strict": "JsonSchema Function CustomTool"},
    "the input of a call is always sent as it comes": {"eager_input_streaming": "CustomTool"},
    "all tools are shown to the model": {"defer_loading": "CustomTool"},
    "chat templates have no word for it, and the result's text tells the model": {"is_error": "ToolResultBlock"},
    "no model here is trained for it": {"verbosity": "ChatCompletionRequest TextOptions"},
    "no model here is trained for it; `max_tokens` limits thoughts and answer together": {"budget_tokens": "Thinking"},
    "thoughts are sent and shown whole": {
        "summary generate_summary": "Reasoning",
        "display": "Thinking",
        "summary": "InputReasoning",
    },
    "only the server that made these thoughts or calls can read it": {
        "encrypted_content": "InputReasoning",
        "data signature": "ThinkingBlock",
        "extra_content": "PastCall",
    },
    "it counts calls of tools that a server runs, and this one runs none": {"max_tool_calls": "ResponsesRequest"},
    "earlier answers come back with it": {
        "id": "Message TextPart",
        "id status provider_specific_fields": "InputMessage InputReasoning InputCall InputCallResult",
        "phase": "InputMessage",
        "annotations": "AssistantMessage TextPart InputPart",
        "logprobs": "InputPart",
        "citations index": "TextPart",
        "index": "PastCall",
        "provider_specific_fields": "Message PastCall PastFunction",
    },
    "other servers' form of thoughts, which are also sent as reasoning_content": {
        "thinking_blocks reasoning_details": "AssistantMessage"
    },
}
"""Fields that clients send and that change nothing: by reason, the names and the classes that have them."""
_NOTHINGS: tuple[Any, ...] = (False, True, 1, "none", "", "disabled", ["text"], [])
NEUTRAL = {f"only {json.dumps(value)}, which asks for nothing": value for value in _NOTHINGS}
"""The only value with which such a field changes nothing, by its reason."""
MAX_KEYS = 1024  # of an object: each unknown key is an error, which takes 10 microseconds


def _check_finite(value: Any) -> Any:
    """Refuse NaN and infinity here, not in the parser, so that the error can name the field."""
    json.dumps(value, allow_nan=False)
    return value


class WholeNumber:
    """An annotation of `int`, after the bounds, that accepts 4.0 without a call of Python."""

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


def at_most(num_keys: int) -> BeforeValidator:
    """Return an annotation of `dict` that counts the keys before it looks at the values, unlike `max_length`."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > num_keys:
            counts = {"number": f"{len(value):,}", "limit": f"{num_keys:,}"}
            raise PydanticCustomError("too_long", "it has {number} entries, at most {limit} are allowed", counts)
        return value

    return BeforeValidator(check, json_schema_input_type=Any)


WHOLE = WholeNumber()
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_finite)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
StopString = Annotated[str, Field(min_length=1, max_length=64)]
NumAlternatives = Annotated[int, Field(ge=0, le=20), WHOLE]
Salt = Annotated[str, Field(min_length=1, max_length=256)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE]


@cache
def ignored(cls: type[BaseModel]) -> Mapping[str, str]:
    """Return the fields that a class ignores, and why."""
    bases = {base.__name__ for base in cls.__mro__}
    rows = [(why, names, {*classes.split()}) for why, row in IGNORED.items() for names, classes in row.items()]
    known = {name: why for why, names, classes in rows if bases & classes for name in names.split()}
    return {name: why for name, why in known.items() if name not in cls.model_fields}


def _document_extras(schema: dict[str, Any], cls: type[BaseModel]) -> None:
    schema["additionalProperties"] = {"type": "null"}
    notes = {name: {"description": f"Accepted and ignored: {why}."} for name, why in ignored(cls).items()}
    schema.setdefault("properties", {}).update(notes)


def _stop_at_first_error(schema: Any) -> None:
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
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_extra=_document_extras
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
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

        def is_nothing(name: str, value: Any) -> bool:
            why = ignored(cls).get(name)
            only = NEUTRAL.get(why or "", value)
            # False equals 0 for Python.
            return value is None or (
                why is not None and value == only and isinstance(value, bool) is isinstance(only, bool)
            )

        return {key: value for key, value in data.items() if key in cls.model_fields or not is_nothing(key, value)}


class ResponseModel(BaseModel):
    """A JSON object for a client."""


_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


def to_json(body: object) -> str:
    """Return the JSON text of a response, or of its fields."""
    return _ANYTHING.dump_json(body, exclude_unset=True).decode()


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
