"""Tools: how a model is made to call functions, and how its calls are read, in the form its chat template teaches.

Two forms are known. Hermes (Qwen, Hermes): `<tool_call>` around `{"name": ..., "arguments": {...}}`, any number of
times, among text. Llama 3: the whole text is `{"name": ..., "parameters": {...}}`, or several of them after semicolons.
A text that only looks like a call stays a text.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from llguidance import LLMatcher
from pydantic import Field

from deployments.fields import RequestModel, Text
from engine.grammar import JSON_OPTIONS

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


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model made; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class CallReader(Protocol):
    """Reads one text as it comes."""

    def feed(self, text: str, *, is_last: bool) -> list[str | Call]:
        """Return the pieces that are certain now; all the rest with the last piece of text."""
        ...


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

    def reader(self) -> "HermesReader":
        """Return a reader for one text."""
        return HermesReader()


class HermesReader:
    """Holds back what may be a call."""

    def __init__(self) -> None:
        self._held = ""
        self._is_between = False

    def feed(self, text: str, *, is_last: bool) -> list[str | Call]:
        """Return the pieces that are certain now; all the rest with the last piece of text."""
        self._held += text
        found: list[str | Call] = []
        while (start := self._held.find(Hermes.START)) >= 0:
            call, end = self._call(start + len(Hermes.START))
            if call is None:
                break
            found += [self._text(start), call]
            self._held = self._held[end - start :]
            self._is_between = True
        certain = start if start >= 0 else len(self._held) - _overlap(self._held, Hermes.START)
        if is_last:
            certain = len(self._held)
        found.append(self._text(certain))
        return [piece for piece in found if piece]

    def _text(self, length: int) -> str:
        """Take so many characters; white space after a call is the form's, not the model's."""
        piece, self._held = self._held[:length], self._held[length:]
        if self._is_between:
            piece = piece.lstrip()
            self._is_between = not piece
        return piece

    def _call(self, start: int) -> tuple[Call | None, int]:
        """Return the call whose JSON starts there and where it ends; the end tag may also stand in a string."""
        end = self._held.find(Hermes.END, start)
        while end >= 0:
            try:
                call = _call_of(json.loads(self._held[start:end]), ("arguments",))
            except (ValueError, RecursionError):
                call = None
            if call is not None:
                return call, end + len(Hermes.END)
            end = self._held.find(Hermes.END, end + 1)
        return None, 0


class Llama3:
    """The whole text is calls, or text."""

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar of one call or, if parallel, any number of them."""
        return _grammar('start: call ("; " call)*' if parallel else "start: call", tools, "parameters")

    def reader(self) -> "Llama3Reader":
        """Return a reader for one text."""
        return Llama3Reader()


class Llama3Reader:
    """Holds back a text that starts like an object."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def feed(self, text: str, *, is_last: bool) -> list[str | Call]:
        """Return the pieces that are certain now; all the rest with the last piece of text."""
        self._held += text
        bare = self._held.lstrip()
        if not self._is_text and bare and not self.TAG.startswith(bare[: len(self.TAG)]):
            self._is_text = not bare.startswith("{")
        if not self._is_text and is_last and (calls := self._calls(bare)):
            return [*calls]
        if not (self._is_text or is_last):
            return []
        piece, self._held = self._held, ""
        return [piece] if piece else []

    def _calls(self, text: str) -> list[Call] | None:
        text = text.removeprefix(self.TAG).strip()
        calls = []
        decoder = json.JSONDecoder()
        while text:
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            call = _call_of(value, ("parameters", "arguments"))
            if call is None:
                return None
            calls.append(call)
            text = text[end:].lstrip("; \n")
        return calls


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


def _call_of(value: object, names: Sequence[str]) -> Call | None:
    """Return the call that a JSON value is, if it is one; its arguments have one of these names."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    for name in names:
        arguments = value.get(name)
        if isinstance(arguments, dict):
            return Call(value["name"], json.dumps(arguments, ensure_ascii=False))
    return None


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
