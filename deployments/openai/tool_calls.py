"""Tool calls: their response fields, and CallReader, which splits growing text into content and tool calls.

A call begins where its name is known and its arguments open. From there on it stays a call, whatever follows, because
chunks that were sent cannot be taken back; its arguments are the text's own characters. Arguments that the model got
wrong, or that the token limit cut, are sent as they are, as OpenAI does. Text that ends before a name is known, or has
no name where one should be, is content, unchanged. The result depends on the text alone, not on how it is cut.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from deployments.openai.fields import ResponseModel

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


class FunctionDelta(ResponseModel):
    """The next piece of a call's arguments; the function's name and no arguments yet, where the call begins."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """The next piece of a call, with its place among the answer's calls; id and type only where it begins."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; the arguments that follow belong to it."""

    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, which are JSON text."""

    text: str


Piece = str | CallStart | Arguments


class CallReader:
    """Reads one text: with an end tag, calls anywhere in it; without one, calls at its beginning.

    It is a state machine: `_step` is the method that reads the next piece of what is held back.
    """

    def __init__(self, start_tag: str, end_tag: str = "") -> None:
        """Start at the beginning of a text.

        Args:
            start_tag: what stands before a call; optional in the text if there is no end tag.
            end_tag: what stands after a call.
        """
        self._start_tag, self._end_tag = start_tag, end_tag
        self._held = ""
        self._num_sent = 0
        self._is_last = False
        self._is_after_call = False
        self._object = ObjectEnd()
        self._pieces: list[Piece] = []
        self._step: Callable[[], bool] = self._find_start if end_tag else self._read_head

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        """Return the pieces that no later text can change; with the last text, all that is left."""
        self._held += text
        self._is_last = is_last
        while self._step():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each step reads what it can of the held text, and returns whether another step can go on at once.

    def _find_start(self) -> bool:
        """Emit text up to a start tag."""
        start = self._held.find(self._start_tag)
        if start < 0:
            self._emit_text(len(self._held) - (0 if self._is_last else _overlap(self._held, self._start_tag)))
            return False
        self._emit_text(start)
        return self._go_to(self._read_head)

    def _read_head(self) -> bool:
        """Read a call up to its arguments."""
        has_separator = self._is_after_call and not self._end_tag
        bare = self._held.lstrip(_BLANK + ";" if has_separator else _BLANK)
        body = bare.removeprefix(self._start_tag).lstrip(_BLANK)
        if not body or self._start_tag.startswith(bare):
            return self._is_last and self._reject()
        if not body.startswith("{"):
            return self._reject()
        if head := _HEAD.match(body):
            self._pieces.append(CallStart(head[1]))
            self._held = body[head.end() :]
            return self._go_to(self._read_arguments)
        end = self._object.find(body)
        if end is None:
            return self._is_last and self._reject()
        call = _parse_call(body[:end])
        if call is None:
            return self._reject()
        self._pieces += call
        self._held = body[end:]
        return self._go_to(self._skip_end_tag)

    def _reject(self) -> bool:
        """Treat what looked like a call as content."""
        self._object = ObjectEnd()
        if self._end_tag:
            self._emit_text(len(self._start_tag))
            return self._go_to(self._find_start)
        if self._is_after_call and not self._held.strip(_BLANK + ";"):
            return False
        return self._go_to(self._pass_all)

    def _pass_all(self) -> bool:
        """Emit all text to the end."""
        self._emit_text(len(self._held))
        return False

    def _read_arguments(self) -> bool:
        """Emit arguments up to the end of their object."""
        end = self._object.find(self._held)
        until = len(self._held) if end is None else end
        if until > self._num_sent:
            self._pieces.append(Arguments(self._held[self._num_sent : until]))
            self._num_sent = until
        if end is None:
            return False
        self._held = self._held[end:]
        return self._go_to(self._skip_rest, depth=1)

    def _skip_rest(self) -> bool:
        """Drop the rest of the call's object after the arguments."""
        bare = self._held.lstrip(_BLANK)
        if not bare:
            return False
        end = self._object.find(self._held) if bare[0] in ",}" else 0
        if end is None:
            return False
        self._held = self._held[end:]
        return self._go_to(self._skip_end_tag)

    def _skip_end_tag(self) -> bool:
        """Drop the end tag."""
        bare = self._held.lstrip(_BLANK)
        if self._end_tag.startswith(bare) and bare != self._end_tag:
            return False
        self._held = bare.removeprefix(self._end_tag)
        self._is_after_call = True
        return self._go_to(self._find_start if self._end_tag else self._read_head)

    def _go_to(self, step: Callable[[], bool], *, depth: int = 0) -> bool:
        self._step = step
        self._num_sent = 0
        self._object = ObjectEnd(depth)
        return True

    def _emit_text(self, length: int) -> None:
        """Emit the first `length` characters; white space after a call belongs to the form and is dropped."""
        text, self._held = self._held[:length], self._held[length:]
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        if text:
            self._pieces.append(text)


class ObjectEnd:
    """Finds the end of a JSON object in a growing text; reads each character once."""

    def __init__(self, depth: int = 0) -> None:
        """Start before the object, or inside `depth` open brackets."""
        self._depth = depth
        self._position = 0
        self._is_string = False

    def find(self, text: str) -> int | None:
        """Return where the object ends, or where a tag interrupts it; None if the text is not that long yet.

        Args:
            text: the same text as in the last call, with more at its end.
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
    """Return the call that a JSON object describes, whatever the order of its keys; None if it is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        return None
    return [CallStart(value["name"]), Arguments(json.dumps(arguments, ensure_ascii=False))]


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text could be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
