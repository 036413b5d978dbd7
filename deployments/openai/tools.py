"""Tools: how a model is made to call functions, and how its calls are read, in the form its chat template teaches.

Two forms are known. Hermes (Qwen, Hermes): `<tool_call>` around `{"name": ..., "arguments": {...}}`, any number of
times, among text. Llama 3: the text begins with `{"name": ..., "parameters": {...}}`, or several of them, semicolons
between. `deployments.openai.call_reader` reads both.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from llguidance import LLMatcher
from pydantic import Field

from deployments.openai.call_reader import CallReader
from deployments.openai.fields import RequestModel, Text
from engine.sampling.grammar import JSON_OPTIONS

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(RequestModel):
    """What the model may call."""

    name: FunctionName
    """Its name."""
    description: Text | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object; null is no arguments."""
    strict: bool | None = None
    """Accepted and ignored: a call that is required matches the schema, one that is not is the model's own."""


class Tool(RequestModel):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class ChosenFunction(RequestModel):
    """The name of a function."""

    name: FunctionName


class ToolChoice(RequestModel):
    """The function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class PastFunction(RequestModel):
    """A call as the model made it."""

    name: FunctionName
    arguments: Text
    """A JSON object, as text."""


class PastCall(RequestModel):
    """A call in an earlier answer."""

    type: Literal["function"]
    id: Text
    function: PastFunction


class ToolForm(Protocol):
    """How a chat template has tools called."""

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar of texts that call these tools and say nothing else."""
        ...

    def reader(self) -> CallReader:
        """Return a reader for one text."""
        ...


def form_of(chat_template: str | None) -> ToolForm | None:
    """Return the form that a template teaches; None if it takes no tools, or in a form that is not known here."""
    if not isinstance(chat_template, str) or not re.search(r"\btools\b", chat_template):
        return None
    if Hermes.START in chat_template:
        return Hermes()
    return Llama3() if '"parameters"' in chat_template else None


class Hermes:
    """Calls in tags, among text."""

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
    """Calls that the text begins with."""

    TAG = "<|python_tag|>"

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar of one call or, if parallel, any number of them."""
        return _grammar('start: call ("; " call)*' if parallel else "start: call", tools, "parameters")

    def reader(self) -> CallReader:
        """Return a reader for one text."""
        return CallReader(self.TAG)


def _grammar(start: str, tools: Sequence[Tool], arguments: str) -> str:
    """Return a Lark grammar in which `call` is one of the tools' calls.

    Each schema is a root of its own, so that its references hold.
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
