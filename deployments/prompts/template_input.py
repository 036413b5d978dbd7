"""What a chat template reads, found once for each template by rendering probes: templates do not declare it.

Marks around the texts of a conversation show what a template leaves out.
"""

import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jinja2 import TemplateError

from engine.errors import RequestError

FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, TemplateError)
"""Raised by templates that refuse messages (TemplateError), or expect other variables or messages."""

Entry = dict[str, Any]
"""A message, call or tool. Until `TemplateInput.messages`, calls have arguments as an object and as `text`."""
Render = Callable[[list[Entry], list[Entry] | None], str]  # of messages and tools, by a template; raises FAILURES
CallIds = Literal["client", "nine", "functions"]

_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "number": {"type": "integer"}}}
_BARE_TOOL: Entry = {"type": "function", "function": {"name": "probe"}}
_DEFAULTS = {"description": "", "parameters": {"type": "object", "properties": {}}}
PROBE_TOOL = _BARE_TOOL | {"function": {"name": "probe", "description": "Probe.", "parameters": _SCHEMA}}
PROBE_ARGUMENTS = {"text": "some words", "number": 3}
_FUNCTION = {"name": "probe", "arguments": PROBE_ARGUMENTS, "text": json.dumps(PROBE_ARGUMENTS)}
PROBE_USER: Entry = {"role": "user", "content": "Hi"}
PROBE_CALL: Entry = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "function": _FUNCTION}]}


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The form in which a chat template reads messages and tools."""

    part_roles: frozenset[str] = frozenset()  # roles whose content is a list of parts instead of text
    text_arguments: bool = False  # whether the arguments of calls are JSON text instead of an object
    call_ids: CallIds = "client"  # or nine letters or digits (Mistral), or `functions.NAME:N` (Kimi), counted
    tool_defaults: dict[str, Any] = field(default_factory=dict)  # fields that each function must have
    lists_tools: bool = False  # whether no tools are an empty list instead of null

    def messages(self, entries: Sequence[Entry]) -> list[Entry]:
        ids: dict[str, str] = {}
        numbers = itertools.count()

        def call_of(call: Entry) -> Entry:
            function, is_numbered = call["function"], self.call_ids == "functions"
            ids[call["id"]] = f"functions.{function['name']}:{next(numbers)}" if is_numbered else self._id(call["id"])
            arguments = function["text" if self.text_arguments else "arguments"]
            function = {"name": function["name"], "arguments": arguments}
            return {"id": ids[call["id"]], "type": "function", "function": function}

        messages = []
        for entry in entries:
            message = dict(entry)
            if entry["role"] in self.part_roles:
                message["content"] = [{"type": "text", "text": entry["content"]}]
            if "tool_calls" in entry:
                message["tool_calls"] = [call_of(call) for call in entry["tool_calls"]]
            if "tool_call_id" in entry:
                message["tool_call_id"] = ids.get(entry["tool_call_id"]) or self._id(entry["tool_call_id"])
            messages.append(message)
        return messages

    def tools(self, tools: Sequence[Entry]) -> list[Entry] | None:
        in_form = [{**tool, "function": self.tool_defaults | tool["function"]} for tool in tools]
        return in_form if tools or self.lists_tools else None

    def _id(self, client_id: str) -> str:
        if self.call_ids != "nine" or re.fullmatch("[a-zA-Z0-9]{9}", client_id):
            return client_id
        return hashlib.blake2s(client_id.encode()).hexdigest()[:9]


class Marks:
    """Marks around the texts, calls and tools of one conversation."""

    def __init__(self) -> None:
        self._word = f"m{secrets.token_hex(8)}n"  # random, so that no client writes it
        self._names: list[tuple[str, set[str]]] = []

    def messages(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return messages with marks; blank texts have none, because templates may omit them."""
        marked = []
        for i, entry in enumerate(entries):
            message = dict(entry)
            if entry["content"].strip():
                name = f"the text of messages[{i}] (role {entry['role']})"
                message["content"] = self._around(entry["content"], name, is_answer=entry["role"] == "assistant")
            if "tool_calls" in entry:
                calls = enumerate(entry["tool_calls"])
                message["tool_calls"] = [self._call(call, f"messages[{i}].tool_calls[{j}]") for j, call in calls]
            marked.append(message)
        return marked

    def tools(self, tools: Sequence[Entry]) -> list[Entry]:
        functions = [tool["function"] for tool in tools]
        names = [self._around(function["name"], f"the name of tools[{i}]") for i, function in enumerate(functions)]
        return [
            {**tool, "function": {**tool["function"], "name": name}} for tool, name in zip(tools, names, strict=True)
        ]

    def check(self, rendered: str) -> None:
        """Raise RequestError if a rendered prompt lacks a text."""
        shown = set(re.findall(rf"{self._word}\d+e", rendered))
        for name, marks in self._names:
            if not marks & shown:
                field = "tools" if "tools[" in name else "messages"
                raise RequestError(f"the chat template leaves out {name}", field)

    def _around(self, text: str, name: str, *, is_answer: bool = False) -> str:
        first, last = (f"{self._word}{2 * len(self._names) + i}e" for i in (0, 1))
        # Templates cut thoughts from the beginning or the end of answers.
        self._names += [(name, {first, last})] if is_answer else [(name, {first}), (name, {last})]
        return f"{first}{text}{last}"

    def _call(self, call: Entry, name: str) -> Entry:
        text = self._around("", f"the arguments of {name}")
        is_object = isinstance(call["function"]["arguments"], dict)
        arguments, text = ({text: text}, json.dumps({text: text})) if is_object else (text, text)
        function_name = self._around(call["function"]["name"], f"the name of {name}")
        return {"id": call["id"], "function": {"name": function_name, "arguments": arguments, "text": text}}


def input_of(render: Render) -> TemplateInput:
    """Return the first form of messages in which a template shows all of the probes."""

    def first(candidates: Sequence[TemplateInput], entries: Sequence[Entry], tools: Sequence[Entry]) -> TemplateInput:
        return next((reads for reads in candidates if _shows(reads, render, entries, tools)), candidates[0])

    def ways(role: str, *all_reads: TemplateInput) -> list[TemplateInput]:
        return [replace(reads, part_roles=reads.part_roles | roles) for reads in all_reads for roles in (set(), {role})]

    user, system, answer, result = ({"role": role, "content": "Hi"} for role in ("user", "system", "assistant", "tool"))
    reads = first(ways("user", TemplateInput(), TemplateInput(lists_tools=True)), [user], [])
    reads = first(ways("system", reads), [system, user], [])
    reads = first(ways("assistant", reads), [user, answer, user], [])
    call_ids: tuple[CallIds, ...] = ("client", "nine", "functions")
    forms = [replace(reads, call_ids=ids, text_arguments=is_text) for ids in call_ids for is_text in (False, True)]
    reads = first(ways("tool", *forms), [user, PROBE_CALL, {**result, "tool_call_id": "call_1"}], [PROBE_TOOL])
    return first([reads, replace(reads, tool_defaults=_DEFAULTS)], [user], [_BARE_TOOL])


def _shows(reads: TemplateInput, render: Render, entries: Sequence[Entry], tools: Sequence[Entry]) -> bool:
    """Return whether a template shows all of a conversation in this form, and arguments of calls as JSON."""
    marks = Marks()
    messages = reads.messages(marks.messages(entries))
    try:
        rendered = render(messages, reads.tools(tools))
        marks.check(rendered)
    except (RequestError, *FAILURES):
        return False
    if reads.part_roles and re.search(r"""["']type["']: ?["']text["']""", rendered):
        return False  # the list itself is shown
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        arguments, name = call["function"]["arguments"], call["function"]["name"]
        # An object in Python's notation is not JSON. Text must be shown as it is, not as a string in JSON.
        if (str(arguments) in rendered) != reads.text_arguments:
            return False
        # A template that writes Kimi's ids itself needs them in results.
        if reads.call_ids != "functions" and f"functions.{name}:" in rendered and call["id"] in rendered:
            return False
    return True


def arrange(reads: TemplateInput, render: Render, entries: Sequence[Entry], tools: Sequence[Entry]) -> Sequence[Entry]:
    """Return messages in the first arrangement that a template shows whole; else raise RequestError or FAILURES."""
    marks = Marks()
    marked, marked_tools = marks.messages(entries), reads.tools(marks.tools(tools))
    refusals = []
    for arranged, arranged_marked in zip(_arrangements(entries), _arrangements(marked), strict=True):
        try:
            marks.check(render(reads.messages(arranged_marked), marked_tools))
        except (RequestError, *FAILURES) as error:
            refusals.append(error)
        else:
            return arranged
    render(reads.messages(entries), reads.tools(tools))  # raises the template's own error, without marks
    raise refusals[0]


def _arrangements(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield messages as they came, then in arrangements that more templates accept."""
    places = [_system_in_place, _system_first, _system_in_user] if any(map(_is_system, entries)) else []
    has_calls = any("tool_calls" in entry for entry in entries)
    for arranged in [entries, _one_call_each(entries)] if has_calls else [entries]:
        yield arranged
        for place in places:
            yield place(arranged)


def _is_system(entry: Entry) -> bool:
    return bool(entry["role"] == "system")


def _system_in_place(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Join the system messages at the beginning; each later system message becomes a user's message."""
    later = [*itertools.dropwhile(_is_system, entries)]
    system = _joined(entries[: len(entries) - len(later)])
    return [*system, *({**entry, "role": "user"} if _is_system(entry) else entry for entry in later)]


def _system_first(entries: Sequence[Entry]) -> Sequence[Entry]:
    return [*_joined([*filter(_is_system, entries)]), *itertools.filterfalse(_is_system, entries)]


def _system_in_user(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Begin the first user's message with all system messages, for templates without a system role."""
    system, *messages = _system_first(entries)
    start = next((i for i, entry in enumerate(messages) if entry["role"] == "user"), 0)
    end = start + 1 if messages and messages[start]["role"] == "user" else start
    return [*messages[:start], *_joined([{**system, "role": "user"}, *messages[start:end]]), *messages[end:]]


def _joined(entries: Sequence[Entry]) -> list[Entry]:
    return [{**entries[0], "content": "\n\n".join(entry["content"] for entry in entries)}] if entries else []


def _one_call_each(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Split each answer into a message of text and a message per call, which the results of that call follow."""
    groups: list[list[Entry]] = []
    called: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry["role"] == "tool":
            called.get(entry["tool_call_id"], groups[-1] if groups else []).append(entry)
            continue
        calls = entry.get("tool_calls", ())
        if not calls:
            groups.append([entry])
        elif entry["content"].strip():
            groups.append([{"role": "assistant", "content": entry["content"]}])
        called, thoughts = {}, {key: entry[key] for key in entry if key == "reasoning_content"}
        for call in calls:
            called[call["id"]] = [{"role": "assistant", "content": "", "tool_calls": [call], **thoughts}]
            groups.append(called[call["id"]])
            thoughts = {}
    return [entry for group in groups for entry in group]
