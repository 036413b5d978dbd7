"""Outline: counts what a JSON body holds before a parser makes anything of it.

A parser makes every item of a list before anyone can count them, and 4 MiB may hold two million lists. This reader
looks at brackets, quotes and commas only; strings and runs of numbers are passed over in C. It stops at the first list
or object that is too long.

It does not check that a body is JSON. The parser does, and until the parser stops at an error both see the same
brackets and quotes, so a body that misleads this reader does not get further than it.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deployments.config import Limits
from engine.errors import PromptTooLongError, RequestError

MAX_DEPTH = 64
MAX_KEYS = 1024
"""Keys of one object."""
MAX_KEY_BYTES = 1024
"""A longer key is no field's name."""
MAX_TOOLS = 128
MAX_NUMBER_CHARS = 1024
SLICE_BYTES = 2**16
"""Bytes that are passed over at once, which takes about a tenth of a millisecond."""
STEPS = 1024
"""Brackets and strings that are read at once, which takes about a millisecond."""

_NOT_JSON = "the body is not valid JSON"
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_OPENING, _CLOSING = b"[{", b"]}"
_PLAIN = re.compile(rb'[^"\[\]{}]*+')
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[^\s,:]{%d}" % (MAX_NUMBER_CHARS + 1))


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a body may hold.

    Attributes:
        entries: how many entries the list or object of a field may have.
        max_prompts: how many texts, or lists of token ids, `prompt` may have.
        max_model_len: how many token ids a list may have; None while it is not known.
        max_values: how many strings, numbers, lists and objects the body may have, without token ids.
    """

    entries: Mapping[str, int]
    max_prompts: int
    max_model_len: int | None
    max_values: int

    @classmethod
    def of(cls, limits: Limits, max_model_len: int | None) -> "Bounds":
        """Return the bounds that follow from the operator's limits and the model's context length."""
        entries = {
            "messages": limits.max_messages,
            "input": limits.max_messages,
            "stop": limits.max_stop,
            "stop_token_ids": limits.max_stop_token_ids,
            "logit_bias": limits.max_logit_bias,
            "tools": MAX_TOOLS,
        }
        return cls(entries, limits.max_prompts, max_model_len, limits.max_values)


@dataclass(slots=True)
class _Container:
    """A list or object that has been opened.

    Attributes:
        field: the field of the body that it belongs to; None for the body itself.
        most: how many entries it may have.
        holds_tokens: whether it is, so far, a list of token ids.
        num_commas: the commas between its entries so far.
    """

    field: str | None
    is_object: bool
    most: int
    holds_tokens: bool = False
    num_commas: int = 0


class Outline:
    """Reads one body."""

    def __init__(self, body: bytes, bounds: Bounds) -> None:
        self._body = body
        self._bounds = bounds
        self._open: list[_Container] = []
        self._num_values = 0
        self._key: str | None = None
        self._expects_key = False

    def read(self) -> Iterator[None]:
        """Read the body; yields about every millisecond, so that others can run in between.

        Raises:
            RequestError: a list, an object or the body holds too much; names the field and the limit.
        """
        body, end = self._body, len(self._body)
        position = num_steps = 0
        while position < end:
            start, position = position, _end_of(_PLAIN, body, position)
            self._pass_plain(start, position)
            num_steps += 1
            if position - start >= SLICE_BYTES or num_steps % STEPS == 0:
                yield
            if position == end:
                break
            byte = body[position]
            if byte == _QUOTE:
                start = position = position + 1
                while (position := _end_of(_TEXT, body, (before := position))) < end and body[position] != _QUOTE:
                    if position == before:  # the body ends with a backslash
                        return
                    yield
                self._pass_string(start, position)
            elif byte in _OPENING:
                self._enter(is_object=byte == _OPENING[1])
            elif byte in _CLOSING:
                if self._open:
                    self._open.pop()
                self._expects_key = False
            else:
                continue  # a slice has ended here
            position += 1

    def _pass_plain(self, start: int, stop: int) -> None:
        """Count the entries that end between two brackets or strings."""
        if stop - start > MAX_NUMBER_CHARS and _LONG_NUMBER.search(self._body, start, stop):
            raise RequestError(f"{_NOT_JSON}, or has a number of more than {MAX_NUMBER_CHARS:,} characters")
        num_commas = self._body.count(b",", start, stop)
        if not num_commas or not self._open:
            return
        container = self._open[-1]
        container.num_commas += num_commas
        self._expects_key = container.is_object
        if container.num_commas >= container.most:
            raise self._too_many(container)
        if not container.holds_tokens:
            self._count(num_commas - 1)

    def _pass_string(self, start: int, stop: int) -> None:
        self._count(1)
        if self._expects_key and len(self._open) == 1:
            self._key = _decoded(self._body[start:stop])
        self._expects_key = False
        self._holds_no_tokens()

    def _enter(self, *, is_object: bool) -> None:
        self._count(1)
        self._holds_no_tokens()
        depth = len(self._open)
        if depth == MAX_DEPTH:
            raise RequestError(f"the body is nested more than {MAX_DEPTH} deep")
        field = self._key if depth == 1 else self._open[-1].field if depth else None
        most = MAX_KEYS if is_object else sys.maxsize  # `max_values` bounds the other lists
        if depth == 1:
            most = self._bounds.entries.get(field or "", most)
        is_list_of_tokens = (field in ("prompt", "tokens") and depth == 1) or (field == "prompt" and depth == 2)
        holds_tokens = is_list_of_tokens and not is_object
        if holds_tokens and self._bounds.max_model_len is not None:
            most = self._bounds.max_model_len
        self._open.append(_Container(field, is_object, most, holds_tokens))
        self._expects_key = is_object

    def _holds_no_tokens(self) -> None:
        """Note that the innermost list has an entry that is no number, so is a list of prompts, if anything."""
        if self._open and self._open[-1].holds_tokens:
            container = self._open[-1]
            container.holds_tokens = False
            container.most = min(container.most, self._bounds.max_prompts)

    def _count(self, num_values: int) -> None:
        self._num_values += num_values
        if self._num_values > (most := self._bounds.max_values):
            raise RequestError(f"the body has more than {most:,} values, at most {most:,} are allowed")

    @staticmethod
    def _too_many(container: _Container) -> RequestError:
        field, most = container.field, container.most
        if container.holds_tokens and field == "prompt":
            return PromptTooLongError(f"prompt has more than {most:,} token ids, the model takes {most:,}", field)
        name = field or ("an object" if container.is_object else "a list")
        return RequestError(f"{name} has more than {most:,} entries, at most {most:,} are allowed", field)


def _end_of(pattern: re.Pattern[bytes], body: bytes, start: int) -> int:
    """Return where a match that begins here ends, at most a slice later."""
    match = pattern.match(body, start, start + SLICE_BYTES)
    assert match is not None  # both patterns match the empty string
    return match.end()


def _decoded(key: bytes) -> str | None:
    """Return a key as the parser will read it; None if it cannot."""
    try:
        decoded: str = json.loads(b'"%b"' % key[:MAX_KEY_BYTES])
    except ValueError:
        return None
    return decoded
