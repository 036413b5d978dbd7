"""Plan: how many draft tokens each request gets in a round. RoundSeconds: how long the round took."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.protocols import Overlap, Request

Reason = Literal["fixed", "off", "goodput", "trial", "request"]


class RoundSeconds(NamedTuple):
    """How long a round took.

    Attributes:
        total_s: from the end of the previous round to the end of this round; from its start, if the engine was idle.
        draft_s: of that, the wait for drafts.
        verify_s: from when the target had this round and had ended the previous round, to its verdicts.
    """

    total_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How many draft tokens each request gets in one round.

    Attributes:
        num_draft_tokens: the longest draft length, copies and fixed lengths apart; also the length of requests that are
            not in `lengths` or `copies`.
        reason: why this length; `request` if all requests fix their lengths.
        copies: the lengths of drafts that are copies, by request id.
        lengths: the lengths of other drafts, by request id.
        num_expected: how many tokens the round is expected to commit; 0 if its lengths are not chosen by cost.
    """

    num_draft_tokens: int
    reason: Reason = "goodput"
    copies: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    overlap: Overlap = "none"
    num_expected: float = 0.0

    @property
    def longest(self) -> int:
        """The longest draft of the round."""
        return max((self.num_draft_tokens, *self.copies.values()))

    def length_of(self, request: Request) -> int:
        """Return the longest draft that a request may get."""
        name = request.request_id
        return limited(request, self.copies.get(name, self.lengths.get(name, self.num_draft_tokens)))


def limited(request: Request, length: int) -> int:
    """Return a draft length within the request's limit, or the length that the request fixes."""
    limit = request.params.num_speculative_tokens
    if limit is None:
        return length
    return limit if request.params.fixes_draft_length else min(limit, length)
