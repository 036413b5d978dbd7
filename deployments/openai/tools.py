"""Tools: the request fields about functions that the model may call, and the grammars of required calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

from llguidance import LLMatcher

from deployments.openai.structured_output import GrammarSource, Thoughts
from deployments.openai.types import JsonObject, Name, RequestModel
from engine.errors import RequestError
from engine.sampling.grammar_text import JSON_OPTIONS, literal, without_annotations

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

CALLS = "tool_calls"
MAX_BLANKS, MAX_NAME = 9, 256
"""Most blanks, and most other characters, that a repeat in a template's pattern matches: no pattern may be slow."""
_REPEAT = re.compile(r"(\\[a-zA-Z]|(?<!\\)[\].])([*+])")
_LOOK_BEHIND = re.compile(r"\(\?<=([^()|]*)\\s\{0,9\}\)")
_VALUE = "(?P<value>.*?)"
THOUGHTS = {"reasoning_content", "thinking"}  # some response templates on the hub use the second name


class Function(RequestModel):
    """What the model may call."""

    name: Name
    """Its name."""
    description: str | None = None
    """What it does, for the model."""
    parameters: JsonObject | None = None
    """The JSON schema of its arguments, an object; null is no arguments."""


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


class PastCall(OfFunctions):
    """A call in an earlier answer."""

    id: str
    function: PastFunction


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How required calls are written: a JSON object after `start`, before `end`, and between calls a `separator`."""

    start: str
    end: str
    separator: str
    arguments: str  # the model's word for arguments
    token_ids: Mapping[str, int] | None = None  # of texts that are single tokens

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar of one call or, if parallel, of several; schemas keep their references."""
        start, end, separator = (literal(text, self.token_ids) for text in (self.start, self.end, self.separator))
        more = f" ({separator} {start} call {end})*" if parallel else ""
        calls = " | ".join(f"call{i}" for i in range(len(tools)))
        lines = [f"start: {start} call {end}{more}", f"call: {calls}"]
        for i, tool in enumerate(tools):
            parameters = tool.function.parameters or {"properties": {}, "additionalProperties": False}
            schema = {"type": "object", **without_annotations(parameters), "x-guidance": JSON_OPTIONS}
            head = json.dumps(f'{{"name": "{tool.function.name}", "{self.arguments}": ')
            lines += [
                f'call{i}: {head} arguments{i} "}}"',
                f"arguments{i}: %json {json.dumps(schema, allow_nan=False)}",
            ]
        return LLMatcher.grammar_from_lark("\n".join(lines))


@dataclass(frozen=True)
class MessageForm:
    """How a model writes messages."""

    template: dict[str, Any]  # transformers' response template
    head: str = ""  # a pattern of a call up to its arguments, with the group `name`; empty if arguments are not JSON
    tool_form: ToolForm | None = None  # None if no call can be required
    mark_token_ids: tuple[int, ...] = ()  # the tokens that delimit parts
    thoughts: Thoughts | None = None  # None if no thoughts come before a constrained answer

    @cached_property
    def loaded(self) -> "ResponseTemplate":
        """The template, as transformers compiles it; raises ValueError if it is invalid."""
        return _load(self.template)

    def begun(self, prompt: str) -> str:
        """Return the part of the answer that a prompt's end already holds, such as the mark that opens thoughts."""
        begun = self.loaded.truncate_past_last_anchor(prompt) if self.loaded.start_anchor_re.search(prompt) else ""
        return begun if begun.strip() else ""

    def thoughts_after(self, prompt: str) -> Thoughts | None:
        """Return the thoughts before a constrained answer, if any; raise RequestError if no grammar can follow them."""
        if self.thoughts is None and THOUGHTS & self.template["fields"].keys():
            raise RequestError("this model's answers cannot be constrained: its thoughts are delimited by patterns")
        return self.thoughts and self.thoughts.after(self.begun(prompt))

    @cached_property
    def head_pattern(self) -> Any:
        """The compiled `head`, as transformers compiles patterns; None if there is no `head`."""
        template = {"start_anchor_pattern": self.head, "fields": {"content": {}}}
        return _load(template).start_anchor_re if self.head else None

    def read_call(self, opening: Any, body: str, tools: list[Any]) -> Any:
        """Return the calls in a body, with values of their tools' types; raises what transformers' readers raise."""
        from transformers.utils.chat_parsing import parse_response
        from transformers.utils.chat_parsing.content_parsers import process_field

        field = self.loaded.fields[CALLS]
        if self._rewrites is not None:
            field, body = replace(field, content="json", content_args={}), self._to_json(body)
        value = process_field(
            body, field, {name: text for name, text in opening.groupdict().items() if text is not None}
        )
        return parse_response("=" + json.dumps(value), _json_template(), prefix="", tools=tools)[CALLS]

    @cached_property
    def _rewrites(self) -> "tuple[re.Pattern[str], re.Pattern[str]] | re.Pattern[str] | None":
        """The opening and closing tag of a call that is read in linear time; None leaves it to transformers' reader."""
        calls = self.loaded.fields[CALLS]
        opening, value, closing = calls.content_args.get("tag_pattern", "").partition(_VALUE)
        if calls.content == "xml-inline" and value and calls.content_args.keys() == {"tag_pattern"}:
            opening = _bounded(opening.replace("(?P<key>.*?)", "(?P<key>[^<]*?)")).replace("\\s{0,9}", "\\s{0,9}+")
            return re.compile(opening, re.DOTALL), re.compile(_bounded(closing), re.DOTALL)
        if calls.content == "json" and calls.content_args:
            delimiters = calls.content_args.get("string_delims", [])
            strings = [f"{re.escape(start)}(.*?){re.escape(end)}" for start, end in delimiters]
            keys = [r"(?<=[{,])(?P<key>\w++)(?=:)"] if calls.content_args.get("unquoted_keys") else []
            return re.compile("|".join(strings + keys), re.DOTALL)
        return None

    def _to_json(self, body: str) -> str:
        if not isinstance(self._rewrites, tuple):
            assert self._rewrites is not None
            return self._rewrites.sub(lambda match: json.dumps(match[match.lastindex or 0]), body)
        (opening, closing), values, end = self._rewrites, {}, 0
        while (start := opening.search(body, end)) and (closed := closing.search(body, start.end())):
            values[start["key"]], end = body[start.end() : closed.start()], closed.end()
        return json.dumps(values)

    @cached_property
    def streaming(self) -> "tuple[ResponseTemplate, ResponseTemplate]":
        """The templates of growing texts, without and with calls; raises ValueError if they are invalid."""
        # Fields are plain text, so that none fails. A call's field begins before its markup and gets all later text.
        plain = {"content": "text", "content_args": {"strip": False}}
        fields: dict[str, Any] = {}
        for name, field in self.template["fields"].items():
            ends = {key: field[key] for key in ("open", "close", "open_pattern", "close_pattern") if key in field}
            fields[name] = plain | {key: _unnamed(end) if "pattern" in key else end for key, end in ends.items()}
        anchor = {key: value for key, value in self.template.items() if key.startswith("start_anchor")}
        without = _load({**anchor, "fields": {name: fields[name] for name in fields if name != CALLS}})
        if CALLS not in fields:
            return without, without
        start = _unnamed(self.loaded.fields[CALLS].open_re.pattern)
        fields[CALLS] = plain | {"open_pattern": f"(?={start})"}
        # The pattern that ends content must not match inside the markup of a call.
        if (name := self.loaded.implicit) is not None and (ending := self.loaded.fields[name].close_re) is not None:
            fields[name] = plain | {"close_pattern": f"(?!{start})(?:{_unnamed(ending.pattern)})"}
        return without, _load({**anchor, "fields": fields})


def required_call(
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    tools: Sequence[Tool] | None,
    form: ToolForm | None,
    *,
    is_parallel: bool,
) -> GrammarSource | None:
    """Return the grammar of the calls that a request requires, or None; raise RequestError if it cannot be followed."""
    if choice in (None, "none"):
        return None
    if tools is None or (not tools and choice != "auto"):
        raise RequestError("tool_choice is only allowed with tools", "tool_choice")
    if choice == "auto":
        return None
    name = choice.function.name if isinstance(choice, ToolChoice) else None
    required, is_parallel = [tool for tool in tools if name in (None, tool.function.name)], is_parallel and name is None
    if not required:
        raise RequestError(f"tool_choice names {name!r}, which is not one of the tools", "tool_choice")
    if form is None:
        raise RequestError("tool_choice requires a call, for which this model's form has no grammar", "tool_choice")
    return GrammarSource(
        "tools", [tool.model_dump() for tool in required], lambda: form.grammar(required, parallel=is_parallel)
    )


@cache
def _json_template() -> "ResponseTemplate":
    return _load({"start_anchor": "=", "fields": {CALLS: {"open": "=", "content": "json"}}})


def _load(template: dict[str, Any]) -> "ResponseTemplate":
    from transformers.utils.chat_parsing.response_templates import load_response_template

    def bounded(part: dict[str, Any]) -> dict[str, Any]:
        return {name: _bounded(value) if name.endswith("_pattern") else value for name, value in part.items()}

    fields = {name: bounded(field) for name, field in template["fields"].items()}
    return load_response_template({**bounded(template), "fields": fields})


def _bounded(pattern: str) -> str:
    def bound(match: re.Match[str]) -> str:
        limit = MAX_BLANKS if match[1] == r"\s" else MAX_NAME
        return f"{match[1]}{{{+(match[2] == '+')},{limit}}}"

    return _LOOK_BEHIND.sub(_spelled_out, _REPEAT.sub(bound, pattern))


def _spelled_out(look_behind: re.Match[str]) -> str:
    """Return a look-behind as alternatives of fixed length: else a partial match may begin where a text begins."""
    ways = "|".join(rf"(?<={look_behind[1]}\s{{{blanks}}})" for blanks in range(1, MAX_BLANKS + 1))
    return rf"(?<!\s{{{MAX_BLANKS + 1}}})(?:(?<={look_behind[1]})|{ways})"


def _unnamed(pattern: str) -> str:
    return re.sub(r"\(\?P?<\w+>", "(?:", pattern)
