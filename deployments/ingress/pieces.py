"""Pieces: cuts long texts, and long lists of token ids, where the tokenizer cuts them too.

The token ids of the pieces are those of the whole. Tokenizers of the byte-level kind split a text into words by a
regular expression and look at each word alone. In the expressions known here a word ends after a letter before a space:
no branch takes a letter and a space after it, none looks behind, and only white space looks ahead. So a text may be cut
between a letter and a space, if no added token reaches over that place. To be sure of both sides, the cut is between
ASCII letters with one space between them. The texts of all other tokenizers stay whole.

Ids become bytes one by one, and all bytes together UTF-8. An ASCII character is whole and ends what is unfinished
before it. So ids may be cut before a token that begins with one.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIECE_CHARS = 16 * 2**10
"""Characters of a piece at least; they take about ten milliseconds."""
PIECE_IDS = 1024
"""Token ids of a piece at least; they take about a millisecond."""

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = (rf"{_LETTERS}\p{{N}}{{1,3}}{_OTHERS}", rf"{_LETTERS}\p{{N}}{_OTHERS}")
"""The expressions of Llama 3 and of Qwen 2 and 3. GPT-2's is part of the byte-level kind."""
_CUT = re.compile(r" (?<=[A-Za-z] )(?=[A-Za-z])")
_SPACE = "Ġ"  # the letter that stands for a space in the tokens of byte-level tokenizers


class Pieces:
    """What is known of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        frame = _frame(tokenizer)
        self.frame: tuple[list[int], list[int]] = frame or ([], [])
        """The ids that the tokenizer puts before and after every text that it cuts."""
        self.cuts_texts = frame is not None and _cuts_words(tokenizer) and _added_tokens_stay_whole(tokenizer)
        decoder = _state(tokenizer.backend_tokenizer.decoder)
        self.cuts_ids = decoder.get("type") == "ByteLevel" and not tokenizer.clean_up_tokenization_spaces

    def of_text(self, text: str) -> Iterator[str]:
        """Yield the pieces of a text, in order; an empty one for each stretch without a place to cut at."""
        start, place = 0, PIECE_CHARS
        while self.cuts_texts and place < len(text):
            cut = _CUT.search(text, place, place + PIECE_CHARS)
            if cut is None:
                place += PIECE_CHARS
                yield ""
            else:
                yield text[start : cut.start()]
                start, place = cut.start(), cut.start() + PIECE_CHARS
        yield text[start:]

    def of_ids(self, token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the pieces of a list of token ids, in order."""
        cuts = [0]
        while self.cuts_ids and (cut := self._cut_from(token_ids, cuts[-1] + PIECE_IDS)) < len(token_ids):
            cuts.append(cut)
        for start, stop in pairwise((*cuts, len(token_ids))):
            yield token_ids[start:stop]

    def _cut_from(self, token_ids: Sequence[int], start: int) -> int:
        """Return the first place from here on at which the ids may be cut."""
        for place in range(start, len(token_ids)):
            token = self._tokenizer.convert_ids_to_tokens(token_ids[place])
            if isinstance(token, str) and (token[:1].isascii() or token.startswith(_SPACE)):
                return place
        return len(token_ids)


def _frame(tokenizer: "PreTrainedTokenizerFast") -> tuple[list[int], list[int]] | None:
    """Return the token ids that are put around every text; None if they are not found around a letter."""
    bare: list[int] = tokenizer("a", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    framed: list[int] = tokenizer("a", split_special_tokens=True)["input_ids"]
    for start in range(len(framed) - len(bare) + 1):
        stop = start + len(bare)
        if framed[start:stop] == bare:
            return framed[:start], framed[stop:]
    return None


def _cuts_words(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return whether the tokenizer looks at words alone, which end between a letter and a space."""
    backend = tokenizer.backend_tokenizer
    if _state(backend.normalizer).get("type") not in (None, "NFC"):  # NFC joins nothing to a space
        return False
    words = _state(backend.pre_tokenizer)
    if words.get("type") == "ByteLevel":
        return bool(words["use_regex"]) and not words["add_prefix_space"]
    steps: list[dict[str, Any]] = words.get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    is_known = split["pattern"].get("Regex") in WORDS and split["behavior"] == "Isolated" and not split["invert"]
    return is_known and not byte_level["use_regex"] and not byte_level["add_prefix_space"]


def _added_tokens_stay_whole(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return whether no added token reaches over a cut, or takes the space beside it."""
    return not any(
        token.lstrip or token.rstrip or token.single_word or _CUT.search(token.content)
        for token in tokenizer.added_tokens_decoder.values()
    )


def _state(part: Any) -> dict[str, Any]:
    """Return the settings of a part of a tokenizer; nothing if it has no such part."""
    if part is None:
        return {}
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state
