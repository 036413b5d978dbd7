"""Tools: the request fields about functions that the model may call, and the two forms of a call.

A model calls in the form that its chat template teaches. Hermes (Qwen, Hermes): `<tool_call>` tags around
`{"name": ..., "arguments": {...}}`, any number of times, anywhere in the text. Llama 3: the text begins with
`{"name": ..., "parameters": {...}}`, or several of them with semicolons between. `tool_calls.py` reads both.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher

from deployments.openai.structured_output import GrammarSource
from deployments.openai.tool_calls import CallReader
from deployments.openai.types import JsonObject, Name, RequestModel
from engine.errors import RequestError
from engine.sampling.grammar import JSON_OPTIONS


class Function(RequestModel):
    """What the model may call."""

    name: Name
    """Its name."""
    description: str | None = None
    """What it does, for the model."""
    parameters: JsonObject | None = None
    """The JSON schema of its arguments, an object; null is no arguments."""
    strict: bool | None = None
    """Accepted and ignored: a required call always matches the schema, a voluntary one need not."""


class OfFunctions(RequestModel):
    """The base of tools, choices and calls: functions are the only kind."""

    type: Literal["function"]


class Tool(OfFunctions):
    """A tool."""

    function: Function


class ChosenFunction(RequestModel):
    """The name of a function."""

    name: Name


class ToolChoice(OfFunctions):
    """The function that must be called."""

    function: ChosenFunction


class PastFunction(RequestModel):
    """A call as the model made it, which may have made up the name."""

    name: str
    arguments: str
    """A JSON object, as text; no text is no arguments. It may have been cut by max_tokens."""
    provider_specific_fields: dict[str, Any] | None = None
    """Accepted and ignored: LiteLLM sends it back with earlier answers."""


class PastCall(OfFunctions):
    """A call in an earlier answer."""

    id: str
    function: PastFunction
    index: int | None = None
    """Accepted and ignored: calls are in their order; clients that join a stream's deltas send it back."""
    provider_specific_fields: dict[str, Any] | None = None
    """Accepted and ignored: LiteLLM sends it back with earlier answers."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes calls: between two tags, with its word for `arguments`.

    Without an end tag, calls are only at the beginning of a text, where they need no tag.
    """

    start_tag: str
    end_tag: str
    arguments: str

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar of one call of these tools or, if parallel, of one or more.

        Schemas are embedded whole, so that references inside them resolve.
        """
        call, separator = "call", "; "
        if self.end_tag:
            call, separator = rf'"{self.start_tag}\n" call "\n{self.end_tag}"', r"\n"
        start = f'start: {call} ("{separator}" {call})*' if parallel else f"start: {call}"
        lines = [start, "call: " + " | ".join(f"call{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            parameters = tool.function.parameters or {"properties": {}, "additionalProperties": False}
            schema = {"type": "object", **parameters, "x-guidance": JSON_OPTIONS}
            head = json.dumps(f'{{"name": "{tool.function.name}", "{self.arguments}": ')
            lines += [
                f'call{i}: {head} arguments{i} "}}"',
                f"arguments{i}: %json {json.dumps(schema, allow_nan=False)}",
            ]
        return LLMatcher.grammar_from_lark("\n".join(lines))

    def reader(self, *, calls_only: bool = False) -> CallReader:
        """Return a reader for one text."""
        return CallReader(self.start_tag, self.end_tag, calls_only=calls_only)


HERMES = ToolForm("<tool_call>", "</tool_call>", "arguments")
LLAMA3 = ToolForm("<|python_tag|>", "", "parameters")


def form_of(chat_template: str | None) -> ToolForm | None:
    """Return the form in a chat template; None if it takes no tools or uses an unknown form."""
    if not isinstance(chat_template, str) or not re.search(r"\btools\b", chat_template):
        return None
    if HERMES.start_tag in chat_template:
        return HERMES
    return LLAMA3 if '"parameters"' in chat_template else None


def required_call(
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    tools: Sequence[Tool] | None,
    form: ToolForm | None,
    *,
    is_parallel: bool,
) -> GrammarSource | None:
    """Return the calls that a request requires, in the model's form; None if the model decides, or cannot call.

    Raises RequestError if `tool_choice` comes without tools, or names another one.
    """
    if choice in (None, "none"):
        return None
    if tools is None or (not tools and choice != "auto"):
        raise RequestError("tool_choice is only allowed with tools", "tool_choice")
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        required = [tool for tool in tools if tool.function.name == name]
        if not required:
            raise RequestError(f"tool_choice names {name!r}, which is not one of the tools", "tool_choice")
    else:
        required = list(tools) if choice == "required" else []
    if not required or form is None:
        return None
    is_parallel = is_parallel and choice == "required"
    return GrammarSource(
        "tools", [tool.model_dump() for tool in required], lambda: form.grammar(required, parallel=is_parallel)
    )
