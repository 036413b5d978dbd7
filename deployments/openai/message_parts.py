"""MessageParser: splits a growing text into content, thoughts and tool calls, which all three APIs write.

transformers' response parser finds where thoughts and calls begin and end, and reads the arguments of calls, by a
template that is data (`MessageForm`). Where arguments are JSON, they are sent as they come: a call begins where its
name is known and its arguments open, and stays a call whatever follows, because sent chunks cannot be taken back. Its
arguments are then the text's own characters, as at OpenAI: wrong or cut ones are sent as they are. Other texts that are
no calls, or end inside one, are content. The parts do not depend on how the text is cut.
"""

import hashlib
import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployments.openai.tools import CALLS, THOUGHTS, MessageForm, Tool

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

_BLANK = " \t\r\n"
_MARK = re.compile(r'["\\{}\[\]<]')


@dataclass(frozen=True, slots=True)
class Content:
    """The next text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next text of the thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts the calls of a message from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which are JSON text."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class MessageParser:
    """Parses one message."""

    def __init__(
        self,
        form: MessageForm,
        *,
        prompt: str = "",
        tools: Sequence[Tool] = (),
        calls_only: bool = False,
        id_basis: str = "",
    ) -> None:
        """Start at the beginning of a message, or where the end of `prompt` leaves it, as in thoughts.

        Args:
            tools: what the model may call; without any, calls are content.
            calls_only: the text must be calls, so other content is the markup of a call that was cut.
            id_basis: names the message; the ids of its calls depend on it and on their order alone.
        """
        self._form, self._calls_only, self._id_basis = form, calls_only, id_basis
        self._tools: list[Any] = [tool.model_dump(exclude_none=True) for tool in tools]
        self._template = form.streaming[bool(tools)]
        self._parser = self._parser_after(form.begun(prompt))
        if any(event["field"] == CALLS for event in self._parser.initial_events):
            self._parser = self._parser_after("")  # a call that the prompt begins is content
        self._parts: list[Part] = []
        self._held = ""
        self._reading: Generator[None, None, tuple[str, str]] | None = None
        self._is_last = self._is_after_call = False
        self._num_calls = 0

    def _parser_after(self, text: str) -> "ResponseParser":
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=text)

    def feed(self, text: str, *, is_last: bool) -> list[Part]:
        """Return the parts that later text cannot change; after the last text, the rest."""
        self._parts, self._is_last = [], is_last
        rest: str | None = text
        while rest is not None:
            rest = self._feed(rest)
        return self._parts

    def _feed(self, text: str) -> str | None:
        """Read as far as possible; return the text after a call, which another parser reads."""
        events = self._parser.feed(text)
        if self._is_last:
            events = [*events, *self._parser.finalize()[1]]
        for event in events:
            if event["type"] == "region_chunk":
                if event["field"] == CALLS:
                    self._held += event["text"]
                elif event["field"] in THOUGHTS:
                    self._add(Reasoning, event["text"])
                else:
                    self._add_content(event["text"])
        if self._reading is None and not self._held:
            return None
        self._reading = self._reading or self._read_call()
        try:
            next(self._reading)
        except StopIteration as end:
            self._held, self._reading = "", None
            begun, rest = end.value
            self._parser = self._parser_after(begun)
            return str(rest)
        return None

    # These generators read as much of the held text as they can, and yield where more is needed.

    def _read_call(self) -> Generator[None, None, tuple[str, str]]:
        """Read a call, or markup that is none; return what another parser starts after, and the text that it reads."""
        head, calls = self._form.head_pattern, self._form.loaded.fields[CALLS]
        while head is not None and (match := head.match(self._held, partial=True)):
            if not match.partial:
                self._start_call(match["name"])
                self._held = self._held[match.end() :]
                yield from self._read_arguments()
                return "", (yield from self._skip_end(calls.close_re))
            if self._is_last:
                break
            yield
        opened = calls.open_re.match(self._held).end()
        end = yield from self._find_end(opened, calls.close_re)
        if end is not None and self._add_calls(self._held[:end]):
            self._held = self._held[end:]
            return "", (yield from self._skip_end(calls.close_re)) if head is not None else self._held
        # The supposed call is content. No pattern for the beginning of a text matches after a letter.
        end = end or opened or 1
        self._add_content(self._held[:end])
        return "x", self._held[end:]

    def _find_end(self, opened: int, closing: Any) -> Generator[None, None, int | None]:
        """Return the end of a call whose arguments are not sent as they come; None if it is none."""
        scanner = ObjectEnd()
        while True:
            if self._form.head_pattern is not None:
                body = self._held[opened:].lstrip(_BLANK)
                if body and not body.startswith("{"):
                    return None
                if (length := scanner.find(body)) is not None:
                    return len(self._held) - len(body) + length
            elif closing is not None and (match := closing.search(self._held, opened)):
                return int(match.end())
            if self._is_last:
                return len(self._held) if closing is None else None
            yield

    def _read_arguments(self) -> Generator[None, None, None]:
        """Read the arguments of a call, and the rest of its object."""
        arguments, num_sent = ObjectEnd(), 0
        while True:
            end = arguments.find(self._held)
            until = len(self._held) if end is None else end
            if until > num_sent:
                self._parts.append(CallArguments(self._num_calls - 1, self._held[num_sent:until]))
                num_sent = until
            if end is not None:
                break
            yield
        self._held = self._held[end:]
        rest = ObjectEnd(depth=1)
        while True:
            bare = self._held.lstrip(_BLANK)
            end = rest.find(self._held) if bare[:1] in (",", "}") else 0
            if bare and end is not None:
                break
            yield
        self._held = self._held[end:]

    def _skip_end(self, closing: Any) -> Generator[None, None, str]:
        """Skip what closes a call; return the text after it."""
        while closing is not None and (match := closing.match(self._held.lstrip(_BLANK), partial=True)):
            if not match.partial:
                return str(match.string[match.end() :])
            if self._is_last:
                return ""
            yield
        return self._held

    def _start_call(self, name: str) -> None:
        self._num_calls += 1
        digest = hashlib.blake2s(f"{self._id_basis}/{self._num_calls}".encode(), digest_size=12).hexdigest()
        self._parts.append(CallStart(self._num_calls - 1, f"call_{digest}", name))
        self._is_after_call = True

    def _add_calls(self, text: str) -> bool:
        """Return whether a text is one or more calls, and add them."""
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(text, self._form.loaded, prefix="", tools=self._tools)
            found = [call for entry in message[CALLS] for call in (entry if isinstance(entry, list) else [entry])]
            functions = [call["function"] for call in found]
            calls = [(entry["name"], entry.get("arguments", entry.get("parameters"))) for entry in functions]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False
        if not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in calls):
            return False
        for name, arguments in calls:
            self._start_call(name)
            self._parts.append(CallArguments(self._num_calls - 1, json.dumps(arguments, ensure_ascii=False)))
        return bool(calls)

    def _add_content(self, text: str) -> None:
        """Add content, without the white space after a call."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        self._add(Content, text)

    def _add(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Add text to the last part, if it is of that kind, or else a part."""
        if self._calls_only and kind is Content:
            return
        if self._parts and isinstance(last := self._parts[-1], kind):
            text = last.text + text
            del self._parts[-1]
        if text:
            self._parts.append(kind(text))


class ObjectEnd:
    """Finds the end of a JSON object in a growing text, reading each character once."""

    def __init__(self, depth: int = 0) -> None:
        """Start before the object, or inside `depth` open brackets."""
        self._depth = depth
        self._position = 0
        self._is_string = False

    def find(self, text: str) -> int | None:
        """Return the index of the object's end or of a tag inside it; None if the text is too short.

        `text` continues the text of the last call.
        """
        while mark := _MARK.search(text, self._position):
            self._position = mark.end()
            match mark[0]:
                case '"':
                    self._is_string = not self._is_string
                case "\\" if self._is_string:
                    self._position += 1  # the escaped character
                case "<" if not self._is_string:
                    return mark.start()
                case "{" | "[" if not self._is_string:
                    self._depth += 1
                case "}" | "]" if not self._is_string:
                    self._depth -= 1
                    if self._depth == 0:
                        return mark.end()
        self._position = max(self._position, len(text))
        return None
