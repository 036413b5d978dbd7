"""Structured output: the request fields that constrain a text, and their grammars."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.types import JsonObject, Name, RequestModel
from engine.errors import RequestError
from engine.sampling.grammar_text import from_choice, from_json_schema, from_regex, from_text, literal


class StructuredOutputs(RequestModel):
    """A constraint on the text: exactly one of these, with vLLM's names."""

    json_: JsonObject | str | None = Field(None, alias="json")
    """A JSON schema, as an object or as its text."""
    regex: str | None = None
    """A regular expression for the whole text, in Rust's syntax."""
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    """The texts that are allowed."""
    grammar: str | None = None
    """A grammar in Lark's or llama.cpp's (GBNF) notation."""


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A JSON schema and its name."""

    name: Name | None = None
    """Not shown to the model."""
    schema_: JsonObject = Field(alias="schema")
    """The schema."""


class JsonSchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a model writes its thoughts and begins its answer."""

    opening: str
    closing: str
    token_ids: Mapping[str, int]  # of texts that are single tokens
    answer: str = ""  # begins the answer, with and without thoughts
    is_open: bool = False  # the prompt has begun the thoughts; else the model begins them or leaves them out

    def after(self, begun: str) -> "Thoughts | None":
        """Return the thoughts that can follow `begun`, the prompt's part of the answer; None if they have ended."""
        is_open = begun.rfind(self.opening.strip()) > begun.rfind(self.closing)
        return replace(self, is_open=is_open) if is_open or not begun.strip() else None

    def before(self, grammar: str, ends: Collection[int]) -> str:
        """Return the grammar of thoughts and then of a text that `grammar` allows.

        Only the closing mark ends thoughts. If a special token is in it, thoughts may hold any other token except
        `ends`; else they hold no special token.
        """
        sources = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        name = sources[0].setdefault("name", "text")
        if marks := [mark for mark in self.token_ids if mark in self.closing]:
            first = min(marks, key=self.closing.index)
            others = ",".join(map(str, sorted({*ends, self.token_ids[first]})))
            closing = literal(self.closing[self.closing.index(first) :], self.token_ids)
            rules = [f"thoughts: any {closing}", f"any: | any <[^{others}]>"]
        else:
            rules = [f"thoughts[suffix={literal(self.closing)}]: /(?s:.*)/"]
        opened = f"({literal(self.opening, self.token_ids)} thoughts BLANK)?"
        answer = literal(self.answer, self.token_ids) if self.answer else ""
        start = f"start: {'thoughts BLANK' if self.is_open else opened} {answer} @{name}"
        lark = "\n".join([start, *rules, r"BLANK: /[ \t\r\n]{0,9}/"])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *sources]})


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A client's constraint before it becomes a grammar, so that the size of `value` can be checked first."""

    field: str
    value: Any
    to_grammar: Callable[[], str]  # raises RequestError if the value has no grammar
    takes_long: bool = False  # up to a second
    thoughts: Thoughts | None = None  # may come before the constrained text


def structured_source(outputs: StructuredOutputs) -> GrammarSource:
    """Return the constraint in `structured_outputs`; raise RequestError unless it holds exactly one constraint."""
    given = {name: value for name, value in outputs.model_dump(by_alias=True).items() if value is not None}
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs has {', '.join(given) or 'none'}; exactly one of {', '.join(_CONVERTERS)} is allowed",
            "structured_outputs",
        )
    [(name, value)] = given.items()
    return GrammarSource(
        f"structured_outputs.{name}", value, lambda: _CONVERTERS[name](value), takes_long=name == "grammar"
    )


def format_source(response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> GrammarSource | None:
    """Return the schema of a `response_format`; None if any text is allowed."""
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


_CONVERTERS: dict[str, Callable[[Any], str]] = {
    "json": _from_schema,
    "regex": from_regex,
    "choice": from_choice,
    "grammar": from_text,
}
