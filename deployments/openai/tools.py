"""Tools: the request fields about functions that the model may call, and the two forms in which models call them.

A model calls in the form that its chat template teaches. Hermes (Qwen, Hermes): `<tool_call>` tags around
`{"name": ..., "arguments": {...}}`, any number of times, anywhere in the text. Llama 3: the text begins with
`{"name": ..., "parameters": {...}}`, or several of them with semicolons between. `tool_calls.py` reads both.
"""

import json
import re
from collections.abc import Sequence
from typing import Literal, Protocol

from llguidance import LLMatcher

from deployments.openai.fields import JsonObject, Name, RequestModel, Text
from deployments.openai.structured_output import GrammarSource
from deployments.openai.tool_calls import CallReader
from engine.errors import RequestError
from engine.sampling.grammar import JSON_OPTIONS


class Function(RequestModel):
    """What the model may call."""

    name: Name
    """Its name."""
    description: Text | None = None
    """What it does, for the model."""
    parameters: JsonObject | None = None
    """The JSON schema of its arguments, an object; null is no arguments."""
    strict: bool | None = None
    """Accepted and ignored: a required call always matches the schema, a voluntary one need not."""


class Tool(RequestModel):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class ChosenFunction(RequestModel):
    """The name of a function."""

    name: Name


class ToolChoice(RequestModel):
    """The function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class PastFunction(RequestModel):
    """A call as the model made it."""

    name: Name
    arguments: Text
    """A JSON object, as text; no text is no arguments."""


class PastCall(RequestModel):
    """A call in an earlier answer."""

    type: Literal["function"]
    id: Text
    function: PastFunction


class ToolForm(Protocol):
    """The form in which a model calls tools."""

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar of texts that call these tools and hold nothing else."""
        ...

    def reader(self) -> CallReader:
        """Return a reader for one text."""
        ...


def form_of(chat_template: str | None) -> ToolForm | None:
    """Return the form that a chat template teaches; None if it takes no tools, or teaches an unknown form."""
    if not isinstance(chat_template, str) or not re.search(r"\btools\b", chat_template):
        return None
    if Hermes.START in chat_template:
        return Hermes()
    return Llama3() if '"parameters"' in chat_template else None


def required_call(
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    tools: Sequence[Tool] | None,
    form: ToolForm | None,
    *,
    is_parallel: bool,
) -> GrammarSource | None:
    """Return the calls that a request requires; None if the model decides, or cannot call.

    Args:
        form: how the model calls tools, if it can.
        is_parallel: whether several calls may be required at once.

    Raises:
        RequestError: `tool_choice` comes without tools, or names another one.
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


class Hermes:
    """Calls in tags, anywhere in the text."""

    START, END = "<tool_call>", "</tool_call>"

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar of one call or, if parallel, any number of them, a line between two."""
        call = rf'"{self.START}\n" call "\n{self.END}"'
        start = rf'start: {call} ("\n" {call})*' if parallel else f"start: {call}"
        return _grammar(start, tools, "arguments")

    def reader(self) -> CallReader:
        """Return a reader for one text."""
        return CallReader(self.START, self.END)


class Llama3:
    """Calls at the beginning of the text."""

    TAG = "<|python_tag|>"

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar of one call or, if parallel, any number of them."""
        return _grammar('start: call ("; " call)*' if parallel else "start: call", tools, "parameters")

    def reader(self) -> CallReader:
        """Return a reader for one text."""
        return CallReader(self.TAG)


def _grammar(start: str, tools: Sequence[Tool], arguments: str) -> str:
    """Return a Lark grammar in which `call` is a call of one of the tools.

    Each schema is embedded whole, so that the references inside it resolve.
    """
    lines = [start, "call: " + " | ".join(f"call{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        schema = {"type": "object", **(tool.function.parameters or {"properties": {}, "additionalProperties": False})}
        head = json.dumps(f'{{"name": "{tool.function.name}", "{arguments}": ')
        lines += [
            f'call{i}: {head} arguments{i} "}}"',
            f"arguments{i}: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, allow_nan=False)}",
        ]
    return LLMatcher.grammar_from_lark("\n".join(lines))
