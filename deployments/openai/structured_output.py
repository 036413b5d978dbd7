"""Structured output: the request fields that say what a text must match, and the grammar that each stands for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.fields import JsonObject, Name, RequestModel, Text
from engine.errors import RequestError
from engine.sampling.grammar import from_choice, from_json_schema, from_regex, from_text


class StructuredOutputs(RequestModel):
    """What the text must match, at every token: exactly one of these, with vLLM's names."""

    json_: JsonObject | Text | None = Field(None, alias="json")
    """A JSON schema, as an object or as its text."""
    regex: Text | None = None
    """A regular expression for the whole text, in Rust's syntax."""
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    """The texts that are allowed."""
    grammar: Text | None = None
    """A grammar in Lark's or llama.cpp's (GBNF) notation."""


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A JSON schema and its name."""

    name: Name
    """Not shown to the model."""
    schema_: JsonObject = Field(alias="schema")
    """The schema."""
    description: Text | None = None
    """Accepted and ignored: the model sees the conversation only."""
    strict: bool | None = None
    """Accepted and ignored: the answer always matches."""


class JsonSchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What a client wrote instead of a grammar.

    Attributes:
        field: the request field that holds it.
        value: the field's value, which is measured before anything else is done with it.
        to_grammar: returns the grammar; raises RequestError where the value cannot be one.
        takes_long: whether that can take a second.
    """

    field: str
    value: Any
    to_grammar: Callable[[], str]
    takes_long: bool = False


def structured_source(outputs: StructuredOutputs) -> GrammarSource:
    """Return what `structured_outputs` holds.

    Raises:
        RequestError: it holds several things, or nothing.
    """
    converters: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "json": (outputs.json_, _from_schema),
        "regex": (outputs.regex, from_regex),
        "choice": (outputs.choice, from_choice),
        "grammar": (outputs.grammar, from_text),
    }
    names = [name for name, (value, _) in converters.items() if value is not None]
    if len(names) != 1:
        raise RequestError(
            f"structured_outputs has {', '.join(names) or 'none'}; exactly one of {', '.join(converters)} is allowed",
            "structured_outputs",
        )
    value, convert = converters[names[0]]
    is_grammar = convert is from_text  # GBNF or Lark
    return GrammarSource(f"structured_outputs.{names[0]}", value, lambda: convert(value), takes_long=is_grammar)


def format_source(response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> GrammarSource | None:
    """Return the schema that a `response_format` names; None if any text is allowed."""
    match response_format:
        case JsonObjectFormat():
            field, schema = "response_format", {"type": "object"}
        case JsonSchemaFormat(json_schema=named):
            field, schema = "response_format.json_schema.schema", named.schema_
        case _:
            return None
    return GrammarSource(field, schema, lambda: from_json_schema(schema))


def _from_schema(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise RequestError("a JSON schema is an object")
    return from_json_schema(schema)
