"""Plan: how many draft tokens each request gets in one round; and how long that round took."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.protocols import Overlap, Request

Reason = Literal["fixed", "off", "goodput", "trial", "request"]


class RoundSeconds(NamedTuple):
    """What a round took.

    Attributes:
        total_s: from the end of the round before it to its end; from its start, if the engine was idle.
        draft_s: of that, waiting for drafts.
        verify_s: from when the target could begin, as it had the round and had ended the one before, to its verdicts.
    """

    total_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How many draft tokens each request gets in one round.

    Attributes:
        num_draft_tokens: the longest draft that is neither a copy nor fixed by its request; requests without a length
            of their own get this one.
        reason: why this length; `request` if all requests fix theirs, and this is the longest.
        copies: the lengths of drafts that are copies, by request id.
        lengths: the lengths of other drafts, by request id.
        overlap: what the drafter does while the target verifies.
        num_expected: how many tokens the requests are expected to commit, of those whose lengths are chosen here.
    """

    num_draft_tokens: int
    reason: Reason = "goodput"
    copies: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    overlap: Overlap = "none"
    num_expected: float = 0.0

    @property
    def longest(self) -> int:
        """The longest draft that any request may get."""
        return max((self.num_draft_tokens, *self.copies.values()))

    def length_of(self, request: Request) -> int:
        """Return the longest draft that a request may get."""
        name = request.request_id
        return limited(request, self.copies.get(name, self.lengths.get(name, self.num_draft_tokens)))


def limited(request: Request, length: int) -> int:
    """Return a draft's length within what its request allows, or the length that the request fixes."""
    limit = request.params.num_speculative_tokens
    if limit is None:
        return length
    return limit if request.params.fixes_draft_length else min(limit, length)
