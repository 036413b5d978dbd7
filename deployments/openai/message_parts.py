"""MessageParser: splits a growing text into content, thoughts and tool calls, for all three APIs.

transformers' response parser finds thoughts and calls by a template (`MessageForm`). JSON arguments are sent as they
come, even if they turn out wrong or cut: sent chunks cannot be taken back. Other text that is not a whole call is
content. The parts do not depend on how the text is cut into pieces.
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
PIECE = 256  # characters read at once; in a longer piece, each character takes longer
MAX_ENDLESS = 4  # calls without an end, after which no end is searched for: each search reads all remaining text
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
    """Parses one message; `num_calls` counts the calls that have begun."""

    def __init__(
        self,
        form: MessageForm,
        *,
        prompt: str = "",
        tools: Sequence[Tool] = (),
        calls_only: bool = False,
        id_basis: str = "",
    ) -> None:
        """Start at the beginning of a message, or where the end of `prompt` leaves it, such as inside thoughts.

        Without `tools`, calls are content. With `calls_only`, content is dropped, because it is the markup of a cut
        call. The ids of calls depend only on `id_basis` and their order.
        """
        self._form, self._calls_only, self._id_basis = form, calls_only, id_basis
        self._tools: list[Any] = [tool.model_dump(exclude_none=True) for tool in tools]
        self._template = form.streaming[bool(tools)]
        begun = form.begun(prompt)
        parser = self._parser_after(begun)
        begun += "x" * any("text" in event for event in parser.finalize()[1])
        # The letter ends what may begin a mark, so that it is not sent again. A call that has begun is content.
        has_call = any(event["field"] == CALLS for event in parser.initial_events)
        self._parser = self._parser_after("x" if has_call else begun)
        self._is_after_call = False
        self.num_calls = 0
        self._text = ""
        self._num_endless = 0
        self._reading = self._read()

    def _parser_after(self, text: str) -> "ResponseParser":
        """Return a parser that has read a text, in pieces: after each mark it searches the whole piece again."""
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(self._template, prefix="")
        for start in range(0, len(text), PIECE):
            parser.initial_events += parser.feed(text[start : start + PIECE])
        return parser

    def feed(self, text: str, *, is_last: bool) -> list[Part]:
        """Return the parts that later text cannot change; after the last text, all parts."""
        self._parts: list[Part] = []
        self._input, self._position, self._is_last = self._text + text, len(self._text), is_last
        next(self._reading)
        return self._parts

    # These generators yield where they need more input. `_text` is input that was read and not yet understood.

    def _next(self) -> Generator[None, None, str]:
        if self._position == len(self._input):
            yield
        piece = self._input[self._position : self._position + PIECE]
        self._position += len(piece)
        return piece

    def _more(self) -> Generator[None]:
        piece = yield from self._next()
        self._text += piece

    @property
    def _is_end(self) -> bool:
        return self._is_last and self._position == len(self._input)

    def _read(self) -> Generator[None]:
        while True:
            self._position -= len(self._text)
            self._text = ""
            events = self._parser.feed((yield from self._next()))
            if self._is_end:
                events = [*events, *self._parser.finalize()[1]]
            for event in events:
                if event["type"] == "region_chunk" and event["field"] == CALLS:
                    self._text += event["text"]
                elif event["type"] == "region_chunk":
                    self._add(Reasoning if event["field"] in THOUGHTS else Content, event["text"])
            if self._text:
                self._parser = self._parser_after((yield from self._read_call()))

    def _read_call(self) -> Generator[None, None, str]:
        """Read a call, or markup without a call; return the text after which the next parser starts."""
        head, calls = self._form.head_pattern, self._form.loaded.fields[CALLS]
        match = head and head.match(self._text, partial=True)
        while match and match.partial and not self._is_end:
            yield from self._more()
            match = head.match(self._text, partial=True)
        if match and not match.partial:
            self._start_call(match["name"])
            self._text = self._text[match.end() :]
            yield from self._read_arguments(is_inside="{" in match[0])
        else:
            opening = calls.open_re.match(self._text)
            body_end, end = (yield from self._find_end(opening.end(), calls.close_re)) or (0, 0)
            if not end or not self._add_calls(opening, body_end):
                end = end or opening.end() or 1
                self._add(Content, self._text[:end])
                self._text = self._text[end:]
                return "x"  # no pattern for the beginning of a text matches after a letter
            self._text = self._text[end:]
        while calls.close_re is not None:
            self._text = self._text.lstrip(_BLANK)
            match = calls.close_re.match(self._text, partial=True)
            if not match:
                break
            if not match.partial or self._is_end:
                self._text = match.string[match.end() :]
                break
            yield from self._more()
        return ""

    def _find_end(self, opened: int, closing: Any) -> Generator[None, None, tuple[int, int] | None]:
        """Return where the body of a call ends, and where the call ends; None if it has no end."""
        scanner, num_read = ObjectEnd(), 0
        searched = opened
        while self._num_endless < MAX_ENDLESS:
            if self._form.head_pattern is not None:
                body = self._text[opened:].lstrip(_BLANK)
                opened = len(self._text) - len(body)  # so that blanks are read once
                if body and not body.startswith("{"):
                    return None
                if (length := scanner.find(body[num_read:])) is not None:
                    end = len(self._text) - len(body) + num_read + length
                    return end, end
                num_read = len(body)
            elif closing is not None:
                match = closing.search(self._text, searched, partial=not self._is_end)
                if match and not match.partial:
                    return match.span()  # type: ignore[no-any-return]
                searched = match.start() if match else len(self._text)
            if self._is_end:
                self._num_endless += 1
                return (len(self._text), len(self._text)) if closing is None else None
            yield from self._more()
        return None

    def _read_arguments(self, *, is_inside: bool) -> Generator[None]:
        """Read the arguments of a call and, if they are inside an object, the end of that object."""
        arguments = ObjectEnd()
        while (end := arguments.find(self._text)) is None:
            self._add_arguments(self._text)
            self._text = ""
            self._text = yield from self._next()
        self._add_arguments(self._text[:end])
        self._text = self._text[end:]
        while is_inside and not (rest := self._text.lstrip(_BLANK)):
            self._text = yield from self._next()
        if is_inside and rest[0] in ",}":
            outer = ObjectEnd(depth=1)
            while (end := outer.find(self._text)) is None:
                self._text = ""
                self._text = yield from self._next()
            self._text = self._text[end:]

    def _add_arguments(self, text: str) -> None:
        index = self.num_calls - 1
        if self._parts and isinstance(last := self._parts[-1], CallArguments) and last.index == index:
            text = self._parts.pop().text + text  # type: ignore[union-attr]
        if text:
            self._parts.append(CallArguments(index, text))

    def _start_call(self, name: str) -> None:
        self.num_calls += 1
        digest = hashlib.blake2s(f"{self._id_basis}/{self.num_calls}".encode()).hexdigest()
        # Some chat templates refuse past calls whose ids are not nine letters or digits.
        self._parts.append(CallStart(self.num_calls - 1, digest[:9], name))
        self._is_after_call = True

    def _add_calls(self, opening: Any, body_end: int) -> bool:
        """Add the calls that follow an opening mark; return whether there are any."""
        try:
            parsed = self._form.read_call(opening, self._text[opening.end() : body_end], self._tools)
            functions = [call["function"] for call in (parsed if isinstance(parsed, list) else [parsed])]
            named = [(entry["name"], entry.get("arguments", entry.get("parameters"))) for entry in functions]
            if not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in named):
                return False
            calls = [(name, json.dumps(entries, ensure_ascii=False, allow_nan=False)) for name, entries in named]
            "".join(map("".join, calls)).encode()  # half a character has no bytes
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False
        for name, arguments in calls:
            self._start_call(name)
            self._parts.append(CallArguments(self.num_calls - 1, arguments))
        return bool(calls)

    def _add(self, part_type: type[Content] | type[Reasoning], text: str) -> None:
        """Append text to the last part if that has this type, else as a new part; drop blanks after a call."""
        if part_type is Content and self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        if self._calls_only and part_type is Content:
            return
        if self._parts and isinstance(last := self._parts[-1], part_type):
            text = last.text + text
            del self._parts[-1]
        if text:
            self._parts.append(part_type(text))


@dataclass(slots=True)
class ObjectEnd:
    """Finds the end of a JSON object in a text that comes in pieces; `depth` counts the open brackets."""

    depth: int = 0
    position: int = 0
    is_string: bool = False

    def find(self, text: str) -> int | None:
        """Return where the object ends in the next piece of text, or where a tag inside it begins; else None."""
        while mark := _MARK.search(text, self.position):
            self.position = mark.end()
            if self.is_string:
                self.is_string = mark[0] != '"'
                self.position += mark[0] == "\\"  # the escaped character
            elif mark[0] == "<":
                return mark.start()
            elif mark[0] == '"':
                self.is_string = True
            elif mark[0] != "\\":
                self.depth += 1 if mark[0] in "{[" else -1
                if self.depth == 0:
                    return mark.end()
        self.position = max(self.position - len(text), 0)
        return None
