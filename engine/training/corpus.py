"""Corpus: reads plain-text files, splits them into training and held-out pieces, and makes batches of token ids.

The split depends on the text alone, so all runs, and `evaluate` later, hold out the same text.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from engine.training.checkpoint import TrainingError

PIECE_CHARACTERS = 8192
HELD_OUT_EVERY = 50
DIALOGUE_EVERY = 10
DOCUMENT_BREAK = "\n\n\n\n"
_SUFFIXES = (".txt", ".txt.gz", ".md", ".rst")


class Piece(NamedTuple):
    """Consecutive paragraphs of one document; `is_last` marks the document's end."""

    text: str
    is_last: bool


class Corpus(NamedTuple):
    """The training pieces and the held-out pieces."""

    training: list[Piece]
    held_out: list[Piece]


def read_text(path: Path) -> str:
    """Read a text file; `.gz` is decompressed."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TrainingError(f"cannot read {path} as text: {error}") from error


def read_corpus(paths: Sequence[Path]) -> Corpus:
    """Read and split files, and the text files of folders in sorted order; three blank lines end a document."""
    pieces: list[Piece] = []
    for path in paths:
        if not path.exists():
            raise TrainingError(f"no such file or directory: {path}")
        is_folder = path.is_dir()
        files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES)) if is_folder else [path]
        for file in files:
            for document in read_text(file).split(DOCUMENT_BREAK):
                pieces += _cut(document.strip("\n"))
    held_out = pieces[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [p for i, p in enumerate(pieces) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    if not training:
        raise TrainingError(f"no text in {', '.join(map(str, paths)) or 'an empty list of files'}")
    # A corpus of fewer than 50 pieces is evaluated on its last training piece, so that small trials work.
    return Corpus(training, held_out or training[-1:])


def _cut(document: str) -> Iterator[Piece]:
    paragraphs = [p for p in document.split("\n\n") if p.strip()]
    begin = size = 0
    for end, paragraph in enumerate(paragraphs, start=1):
        size += len(paragraph)
        if size >= PIECE_CHARACTERS or end == len(paragraphs):
            yield Piece("\n\n".join(paragraphs[begin:end]), is_last=end == len(paragraphs))
            begin, size = end, 0


def as_dialogue(text: str) -> list[list[dict[str, str]]]:
    """Turn a piece into exchanges of user and assistant, because the corpus has none to train the role tokens."""
    paragraphs = text.split("\n\n")
    exchanges = []
    while len(paragraphs) >= 2:
        answer = paragraphs[1:2]
        while len(answer) < len(paragraphs) - 1 and sum(map(len, answer)) < PIECE_CHARACTERS // 10:
            answer.append(paragraphs[len(answer) + 1])
        answered = {"role": "assistant", "content": "\n\n".join(answer)}
        exchanges.append([{"role": "user", "content": paragraphs[0]}, answered])
        paragraphs = paragraphs[len(answer) + 1 :]
    return exchanges


def render(pieces: Iterable[Piece], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the training text of each piece; every tenth piece becomes a dialogue."""
    for i, piece in enumerate(pieces):
        if i % DIALOGUE_EVERY == DIALOGUE_EVERY - 1 and tokenizer.chat_template:
            exchanges = as_dialogue(piece.text)
            yield "".join(str(tokenizer.apply_chat_template(e, tokenize=False)) for e in exchanges)
        else:
            yield piece.text + (str(tokenizer.eos_token or "") if piece.is_last else "\n\n")


def tokenize(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Encode texts and join them without padding: [num_tokens] int64."""
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for row in encoded for token in row], dtype=torch.int64)


@dataclass(frozen=True)
class Batches:
    """A corpus as an endless, shuffled sequence of batches; batch i depends on i alone, so a resumed run repeats it.

    Each epoch cuts the tokens at a new offset, so windows do not repeat.
    """

    tokens: torch.Tensor
    length: int
    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows_per_epoch < 1:
            raise TrainingError(f"corpus has {len(self.tokens):,} tokens, one row takes {self.length + 1:,}")

    @property
    def rows_per_epoch(self) -> int:
        return (len(self.tokens) - 1) // self.length - 1 or int(len(self.tokens) > self.length)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return batch `index`: [rows, length + 1]."""
        return torch.stack([self._row(row) for row in range(index * self.rows, (index + 1) * self.rows)])

    def _row(self, row: int) -> torch.Tensor:
        epoch, index_in_epoch = divmod(row, self.rows_per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        room = len(self.tokens) - self.rows_per_epoch * self.length
        offset = int(torch.randint(room, (1,), generator=generator))
        order = torch.randperm(self.rows_per_epoch, generator=generator)
        begin = offset + int(order[index_in_epoch]) * self.length
        return self.tokens[begin : begin + self.length + 1]
