"""Prompts: from files, from the shared data sets, or text of a given number of tokens."""

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .server import LoadError
from .traces import BLOCK_TOKENS

SHARED_PROMPTS = Path(__file__).parents[3] / "shared" / "data" / "prompts"
FIELDS = ("prompt", "text", "question", "turns", "messages")
"""Where a line of JSON has its prompt; of several turns the first one is asked."""
CountTokens = Callable[[str], Awaitable[int]]
_PROBE_CHARS = 1600


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        content: text, or the messages of a chat.
        domain: which group of prompts it belongs to; figures are also given for each.
        num_tokens: how many tokens to generate; None is the run's `--max-tokens`.
    """

    content: str | list[dict[str, Any]]
    domain: str
    num_tokens: int | None = None


def read_prompts(sources: Sequence[str], *, seed: int) -> list[Prompt]:
    """Return the prompts of files or shared data sets, mixed; the same for the same seed.

    A `.jsonl` file has a prompt in each line, in one of `FIELDS`; a `domain` or `category` in the line names its group,
    else the file does. In any other file, blank lines part the prompts. `humaneval`, `mt_bench` and `gsm8k` are the
    shared data sets, `bundled` the prompts of the bundled pair's card.

    Raises LoadError if a file cannot be read, or holds no prompt.
    """
    prompts: list[Prompt] = []
    for source in sources:
        path = _path(source)
        try:
            text = path.read_text()
        except OSError as error:
            shared = f"nor is it in {SHARED_PROMPTS}"
            raise LoadError(f"prompts {source!r}: {path} cannot be read ({error.strerror}), {shared}") from error
        name = source if source == "bundled" else path.stem
        read = _read_lines(text, path) if path.suffix == ".jsonl" else _read_paragraphs(text, name)
        if not read:
            raise LoadError(f"prompts {source!r}: {path} holds none")
        prompts += read
    random.Random(seed).shuffle(prompts)
    return prompts


def _path(source: str) -> Path:
    """Return the file of a source; for the bundled pair's, without importing the package, which would load torch."""
    if source == "bundled":
        package = find_spec("engine")
        assert package is not None
        assert package.origin is not None
        return Path(package.origin).parent / "pair" / "prompts.txt"
    shared = SHARED_PROMPTS / f"{source}.jsonl"
    return shared if shared.is_file() else Path(source)


def _read_lines(text: str, path: Path) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            content = next(row[name] for name in FIELDS if row.get(name))
        except (ValueError, AttributeError, StopIteration):
            raise LoadError(f"{path}:{number} is no JSON object with one of {', '.join(FIELDS)}") from None
        if "turns" in row and content is row["turns"]:
            content = content[0]
        prompts.append(Prompt(content, row.get("domain") or row.get("category") or path.stem))
    return prompts


def _read_paragraphs(text: str, domain: str) -> list[Prompt]:
    return [Prompt(paragraph.strip("\n"), domain) for paragraph in text.split("\n\n") if paragraph.strip()]


class SizedText:
    """Makes text of about a given number of tokens, out of the text of other prompts.

    The server counts the tokens, so no tokenizer is needed here. Two counts give the tokens that surround any prompt
    (those of a chat template, for example) and the characters of a token.

    Args:
        prompts: whose text is used.
        count_tokens: counts the tokens of a prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], count_tokens: CountTokens) -> None:
        text = "\n\n".join(prompt.content for prompt in prompts if isinstance(prompt.content, str))
        if not text:
            raise LoadError("text of a given length is made of the prompts' text, but all prompts are messages")
        while len(text) < 2 * _PROBE_CHARS:
            text += "\n\n" + text
        self._text = text
        self._count_tokens = count_tokens
        self._num_surrounding = 0.0
        self._chars_per_token = 1.0

    async def calibrate(self) -> None:
        """Ask the server for the two counts."""
        short = await self._count_tokens(self._text[: _PROBE_CHARS // 2])
        long = await self._count_tokens(self._text[:_PROBE_CHARS])
        self._chars_per_token = _PROBE_CHARS / 2 / max(1, long - short)
        self._num_surrounding = max(0.0, short - _PROBE_CHARS / 2 / self._chars_per_token)

    def about(self, num_tokens: int, seed: int, block_ids: Sequence[int] = ()) -> str:
        """Return text of about that many tokens.

        Args:
            seed: where in the prompts' text it begins.
            block_ids: contents of its first blocks of 512 tokens: the same text for the same id.
        """
        num_chars = max(1, round((num_tokens - self._num_surrounding) * self._chars_per_token))
        block_chars = round(BLOCK_TOKENS * self._chars_per_token)
        blocks = "".join(self._from(block_id, block_chars) for block_id in block_ids)
        return (blocks + self._from(seed, max(0, num_chars - len(blocks))))[:num_chars]

    def _from(self, seed: int, num_chars: int) -> str:
        start = random.Random(seed).randrange(len(self._text))
        repeats = 1 + (start + num_chars) // len(self._text)
        return (self._text * repeats)[start : start + num_chars]
