"""Proposal: a group's rows that wait for drafts, and how many of them a pass drafts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cluster.protocol.messages import AnyReply, Propose
from cluster.protocol.prefix_delta import PrefixTable
from engine.drafting.run_ahead.passes import PassesAhead
from engine.protocols import Draft, ProposeRow


@dataclass(slots=True, eq=False)
class Group:
    """The prefixes that a lease's group has sent, and its run-ahead drafter of each draft, if the worker runs ahead."""

    table: PrefixTable
    aheads: list[PassesAhead]


@dataclass(slots=True, eq=False)
class Proposal:
    """A proposal with rows that are not drafted yet; its drafts are worthless after `due`."""

    group: Group
    request: Propose
    rows: list[ProposeRow]
    due: float
    answer: Callable[[AnyReply], None]
    is_caught_up: bool = False
    compute_s: float = 0.0
    drafts: list[Draft] = field(default_factory=list)

    @property
    def missing(self) -> list[ProposeRow]:
        return self.rows[len(self.drafts) :]

    @property
    def depth(self) -> int:
        return max((row.num_draft_tokens for row in self.missing), default=0)

    @property
    def aheads(self) -> list[PassesAhead]:
        """The group's run-ahead drafters; empty if the proposal is drafted together with others."""
        return self.group.aheads if self.request.runs_ahead else []


def share_rows(proposals: Sequence[Proposal], room: int) -> Counter[Proposal]:
    """Return how many rows of each proposal are drafted in one pass: all, or equal shares of the room."""
    counts = Counter({proposal: len(proposal.missing) for proposal in proposals})
    if counts.total() <= room:
        return counts
    longest = max(counts.values())
    turns = (proposal for turn in range(longest) for proposal in proposals if turn < counts[proposal])
    return Counter(islice(turns, room))
