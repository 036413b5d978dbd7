"""CachedPrefix: the tokens of a request whose keys and values a drafter holds, compared with the request's text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class CachedPrefix:
    """The tokens of one request whose keys and values are cached, and the blocks that hold them.

    Attributes:
        num_committed: how many of the tokens were committed when they were last compared; these never change.
        encoder_length: how many of the request's first tokens are an encoder's input; all or none of them are cached.
    """

    token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0
    encoder_length: int = 0


class Text(NamedTuple):
    """A request's committed tokens and the draft tokens after them, which are not copied: texts can be long."""

    committed: Sequence[int]
    drafted: Sequence[int]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.committed) + len(self.drafted)

    def part(self, start: int, end: int) -> list[int]:
        """Return the tokens from `start` to before `end`."""
        base = len(self.committed)
        return [*self.committed[start:end], *self.drafted[max(start - base, 0) : max(end - base, 0)]]


def common_length(prefix: CachedPrefix, text: Text) -> int:
    """Return how many of a prefix's tokens a text begins with, and note how many of these are committed.

    The text's last token never counts: its logits are needed, so it is always computed again. Committed tokens are
    compared once.
    """
    length = min(len(prefix.token_ids), text.length - 1)
    first = min(prefix.num_committed, length)
    pairs = zip(prefix.token_ids[first:length], text.part(first, length), strict=True)
    same = next((i for i, (known, token) in enumerate(pairs, first) if known != token), length)
    prefix.num_committed = min(same, len(text.committed))
    return same
