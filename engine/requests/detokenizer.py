"""Detokenizer: turns token ids into text. TokenBytes: the bytes of each token."""

import re
from collections.abc import Collection, Sequence
from functools import cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

_UNFINISHED = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of sentencepiece
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
"""The byte of each letter in the tokens of byte-level BPE."""


class Detokenizer:
    """Decodes a request's tokens as they come; holds back incomplete characters and beginnings of stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        marks: Collection[int] = (),
    ) -> None:
        """Start after a prompt; `marks` are shown even if they are special, and not searched for stop strings."""
        self._tokenizer = tokenizer
        self._marks = frozenset(marks)
        self._token_bytes = TokenBytes.of(tokenizer)
        self._hidden = self._token_bytes.special_ids - self._marks if skip_special else frozenset()
        # A byte-level decoder gives the same text however tokens are split over calls. Other decoders do not: they
        # drop a whole run of bytes if a byte is invalid.
        decoder = getattr(tokenizer, "backend_tokenizer", tokenizer).decoder
        self._takes_several = isinstance(decoder, ByteLevel)
        self._stop = tuple(stop)
        # A token's text can depend on a few tokens before it (spaces, bytes), so decoding starts 6 tokens earlier, and
        # never inside a character.
        ids = [token for token in prompt_token_ids[-48:] if token not in self._hidden]
        start = max(0, len(ids) - 6)
        while start and b"\x80" <= self._token_bytes(ids[start])[:1] < b"\xc0":
            start -= 1
        self._ids, self._num_decoded = ids[start:], len(ids) - start
        self._decoded = self._decode()
        self._held = ""

    def append(self, token_ids: Sequence[int], *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add tokens; return the text that is now final, and the stop string that ends it, which is cut off, if any.

        Args:
            may_stop: whether stop strings count yet; see `SamplingParams.min_tokens`.
        """
        has_mark = bool(self._stop) and not self._marks.isdisjoint(token_ids)
        if len(token_ids) > 1 and (has_mark or not self._takes_several):
            return self._append_one_by_one(token_ids, may_stop)
        may_stop = may_stop and not has_mark
        token_ids = [token for token in token_ids if token not in self._hidden]
        self._ids += token_ids
        text = self._decode()
        if len(token_ids) > 1 and _UNFINISHED in text:
            # Some character is incomplete or invalid; the text before it is final already.
            del self._ids[-len(token_ids) :]
            return self._append_one_by_one(token_ids, may_stop)
        if text.endswith(_UNFINISHED):
            return "", None
        if not text.startswith(self._decoded):
            # The token completed a character that the prompt began; it counts as the prompt's.
            self._decoded, self._num_decoded = text[: len(self._decoded)], len(self._ids)
        new = self._held + text[len(self._decoded) :]
        if len(text) > len(self._decoded):
            # The new text holds whole characters, so the next call can start decoding with these tokens.
            del self._ids[: self._num_decoded]
            self._num_decoded = len(self._ids)
            self._decoded = self._decode()
        self._held = ""
        if not may_stop:
            return new, None
        if matches := [(position, stop) for stop in self._stop if (position := new.find(stop)) >= 0]:
            position, stop = min(matches)
            return new[:position], stop
        longest = max(map(len, self._stop), default=1) - 1
        # The longest end of the text that begins a stop string.
        for start in range(max(0, len(new) - longest), len(new)):
            if any(stop.startswith(new[start:]) for stop in self._stop):
                self._held = new[start:]
                return new[:start], None
        return new, None

    def _append_one_by_one(self, token_ids: Sequence[int], may_stop: bool) -> tuple[str, str | None]:
        text = ""
        for token in token_ids:
            new, stop = self.append([token], may_stop=may_stop)
            text += new
            if stop is not None:
                return text, stop
        return text, None

    def finish(self) -> str:
        text = self._held + self._decode()[len(self._decoded) :]
        self._held, self._decoded = "", self._decode()
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)


class TokenBytes:
    """The bytes that a token adds to a text; they may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        added = backend.get_added_tokens_decoder().items()
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        self._token = backend.id_to_token
        self._decode = backend.decoder.decode if backend.decoder is not None else " ".join
        self._bytes = cache(self._read)

    @staticmethod
    @cache
    def of(tokenizer: Tokenizer) -> "TokenBytes":
        """Return a tokenizer's object, made on first use."""
        return TokenBytes(tokenizer)

    def __call__(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Return a token's bytes; some decoders drop the leading space of the first token in a text."""
        return self._bytes(token_id, is_first)

    def texts(self, token_ids: Sequence[int], *, is_first: bool = False) -> list[str]:
        """Return the text of each token, with U+FFFD for incomplete characters."""
        return [self._bytes(token_id, is_first).decode(errors="replace") for token_id in token_ids]

    def _read(self, token_id: int, is_first: bool) -> bytes:
        token = self._token(token_id) or ""
        before = [] if is_first else ["a"]
        text: str = self._decode([*before, token])[len(before) :]
        if _UNFINISHED in text:
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(match[1])
            if all(letter in _BYTE_OF for letter in token):
                return bytes(_BYTE_OF[letter] for letter in token)
        return text.encode()
