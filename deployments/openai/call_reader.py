"""CallReader: from a text as it comes to what of it is content, and what is a call's name and arguments.

A call begins where its name is known and its arguments open. From there on it is one, whatever follows, and its
arguments are the text's own characters: what was sent cannot be taken back. So arguments that a model got wrong, or
that the token limit cut, come as they are, as at OpenAI. A text that breaks off before its name is known, or that has
no name where one is due, is content to the last character. All of it depends on the text alone, not on how it is cut.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

_BLANK = " \t\r\n"
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MARK = re.compile(r'["\\{}\[\]<]')


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; arguments that follow are its own."""

    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the JSON text that is a call's arguments."""

    text: str


Piece = str | CallStart | Arguments


class CallReader:
    """Reads one text: calls in tags anywhere in it, or without an end tag calls that the text begins with."""

    def __init__(self, start_tag: str, end_tag: str = "") -> None:
        """Take the tags around a call; without an end tag, the start tag may be missing."""
        self._start_tag, self._end_tag = start_tag, end_tag
        self._held = ""
        self._num_sent = 0
        self._is_last = False
        self._is_between = False
        self._object = ObjectEnd()
        self._found: list[Piece] = []
        self._step: Callable[[], bool] = self._seek if end_tag else self._open

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        """Return the pieces that are certain now; all the rest with the last piece of text."""
        self._held += text
        self._is_last = is_last
        while self._step():
            pass
        found, self._found = self._found, []
        return found

    # Each step takes what it can from the held text. It returns whether another step follows at once.

    def _seek(self) -> bool:
        """Pass on text up to a start tag."""
        start = self._held.find(self._start_tag)
        if start < 0:
            self._say(len(self._held) - (0 if self._is_last else _overlap(self._held, self._start_tag)))
            return False
        self._say(start)
        return self._go(self._open)

    def _open(self) -> bool:
        """Read a call up to its arguments."""
        bare = self._held.lstrip(_BLANK + ";") if self._is_between and not self._end_tag else self._held.lstrip(_BLANK)
        body = bare.removeprefix(self._start_tag).lstrip(_BLANK)
        if not body or self._start_tag.startswith(bare):
            return self._is_last and self._reject()
        if not body.startswith("{"):
            return self._reject()
        if head := _HEAD.match(body):
            self._found.append(CallStart(head[1]))
            self._held = body[head.end() :]
            return self._go(self._arguments)
        end = self._object.find(body)
        if end is None:
            return self._is_last and self._reject()
        call = _call_of(body[:end])
        if call is None:
            return self._reject()
        self._found += call
        self._held = body[end:]
        return self._go(self._close)

    def _reject(self) -> bool:
        """Take for content what might have been a call."""
        self._object = ObjectEnd()
        if self._end_tag:
            self._say(len(self._start_tag))
            return self._go(self._seek)
        if self._is_between and not self._held.strip(_BLANK + ";"):
            return False
        return self._go(self._talk)

    def _talk(self) -> bool:
        """Pass on text to the end."""
        self._say(len(self._held))
        return False

    def _arguments(self) -> bool:
        """Pass on arguments up to the end of their object."""
        end = self._object.find(self._held)
        until = len(self._held) if end is None else end
        if until > self._num_sent:
            self._found.append(Arguments(self._held[self._num_sent : until]))
            self._num_sent = until
        if end is None:
            return False
        self._held = self._held[end:]
        return self._go(self._finish, depth=1)

    def _finish(self) -> bool:
        """Drop what follows the arguments in the call's object, up to its end."""
        bare = self._held.lstrip(_BLANK)
        if not bare:
            return False
        end = self._object.find(self._held) if bare[0] in ",}" else 0
        if end is None:
            return False
        self._held = self._held[end:]
        return self._go(self._close)

    def _close(self) -> bool:
        """Drop the end tag."""
        bare = self._held.lstrip(_BLANK)
        if self._end_tag.startswith(bare) and bare != self._end_tag:
            return False
        self._held = bare.removeprefix(self._end_tag)
        self._is_between = True
        return self._go(self._seek if self._end_tag else self._open)

    def _go(self, step: Callable[[], bool], *, depth: int = 0) -> bool:
        self._step = step
        self._num_sent = 0
        self._object = ObjectEnd(depth)
        return True

    def _say(self, length: int) -> None:
        """Pass on so many characters; white space after a call is the form's, not the model's."""
        text, self._held = self._held[:length], self._held[length:]
        if self._is_between:
            text = text.lstrip()
            self._is_between = not text
        if text:
            self._found.append(text)


class ObjectEnd:
    """Finds where a JSON object ends, in a text that grows; reads each character once."""

    def __init__(self, depth: int = 0) -> None:
        """Start at the object, or inside so many brackets."""
        self._depth = depth
        self._position = 0
        self._is_string = False

    def find(self, text: str) -> int | None:
        """Return where the object ends, or stops being JSON because a tag begins; None if the text has not got there.

        Args:
            text: from the same place on as before, with more at its end.
        """
        while mark := _MARK.search(text, self._position):
            self._position = mark.end()
            match mark[0]:
                case '"':
                    self._is_string = not self._is_string
                case "\\" if self._is_string:
                    self._position += 1  # what it escapes
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


def _call_of(text: str) -> list[Piece] | None:
    """Return the call that a JSON object is, if it is one, in whatever order it says so."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        return None
    return [CallStart(value["name"]), Arguments(json.dumps(arguments, ensure_ascii=False))]


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
