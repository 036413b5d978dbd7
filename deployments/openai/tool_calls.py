"""Tool calls: their response fields, and CallReader, which splits growing text into content and tool calls.

A call begins where its name is known and its arguments open, and stays a call whatever follows, because sent chunks
cannot be taken back. Its arguments are the text's own characters, as at OpenAI: wrong or cut ones are sent as they are.
Text that ends before a name, or has none where one is due, is content. The result does not depend on how the text is
cut.
"""

import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from deployments.openai.types import ResponseModel

_BLANK = " \t\r\n"
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MARK = re.compile(r'["\\{}\[\]<]')


class FunctionCall(ResponseModel):
    """A function's name and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; the arguments that follow belong to it."""

    name: str
    id: str = ""
    """Given by the writer."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, which are JSON text."""

    text: str


Piece = str | CallStart | Arguments


class CallReader:
    """Reads one text: with an end tag, calls anywhere in it; without one, calls at its beginning."""

    def __init__(self, start_tag: str, end_tag: str = "", *, calls_only: bool = False) -> None:
        """Start at the beginning of a text, with calls between two tags; without an end tag, the start tag is optional.

        With `calls_only` the text must be calls, so a remainder is the markup of a call that was cut.
        """
        self._calls_only = calls_only
        self._start_tag, self._end_tag = start_tag, end_tag
        self._held = ""
        self._is_last = False
        self._is_after_call = False
        self._pieces: list[Piece] = []
        self._reading = self._read()

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        """Return the pieces that later text cannot change; after the last text, the rest."""
        self._held += text
        self._is_last = is_last
        next(self._reading)
        pieces, self._pieces = self._pieces, []
        return [piece for piece in pieces if not isinstance(piece, str)] if self._calls_only else pieces

    # These generators read as much of the held text as they can, and yield where more is needed.

    def _read(self) -> Iterator[None]:
        while True:
            if self._end_tag:
                yield from self._find_start()
            if (yield from self._read_call()):
                yield from self._skip_end_tag()
            elif self._end_tag:
                self._emit_text(len(self._start_tag))  # the supposed call is content
            else:
                yield from self._pass_rest()

    def _find_start(self) -> Iterator[None]:
        while (start := self._held.find(self._start_tag)) < 0:
            self._emit_text(len(self._held) - (0 if self._is_last else _overlap(self._held, self._start_tag)))
            yield
        self._emit_text(start)

    def _read_call(self) -> Generator[None, None, bool]:
        """Return whether the held text begins with a call, and read it."""
        has_separator = self._is_after_call and not self._end_tag
        end = ObjectEnd()
        while True:
            bare = self._held.lstrip(_BLANK + ";" if has_separator else _BLANK)
            body = bare.removeprefix(self._start_tag).lstrip(_BLANK)
            if body and not self._start_tag.startswith(bare):
                if not body.startswith("{"):
                    return False
                if head := _HEAD.match(body):
                    self._pieces.append(CallStart(head[1]))
                    self._held = body[head.end() :]
                    yield from self._read_arguments()
                    return True
                if (length := end.find(body)) is not None:
                    call = _parse_call(body[:length])
                    if call is not None:
                        self._pieces += call
                        self._held = body[length:]
                    return call is not None
            if self._is_last:
                return False
            yield

    def _read_arguments(self) -> Iterator[None]:
        """Read the arguments of a call, and the rest of its object."""
        arguments, num_sent = ObjectEnd(), 0
        while True:
            end = arguments.find(self._held)
            until = len(self._held) if end is None else end
            if until > num_sent:
                self._pieces.append(Arguments(self._held[num_sent:until]))
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

    def _skip_end_tag(self) -> Iterator[None]:
        while self._end_tag.startswith(bare := self._held.lstrip(_BLANK)) and bare != self._end_tag:
            yield
        self._held = bare.removeprefix(self._end_tag)
        self._is_after_call = True

    def _pass_rest(self) -> Iterator[None]:
        """Emit all other text, except separators at the end."""
        while True:
            if not self._is_after_call or self._held.strip(_BLANK + ";"):
                self._emit_text(len(self._held))
            yield

    def _emit_text(self, length: int) -> None:
        """Emit the first `length` characters, without the white space after a call."""
        text, self._held = self._held[:length], self._held[length:]
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        if text:
            self._pieces.append(text)


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


def _parse_call(text: str) -> list[Piece] | None:
    """Return the call in a JSON object; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        return None
    return [CallStart(value["name"]), Arguments(json.dumps(arguments, ensure_ascii=False))]


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix that could begin a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
