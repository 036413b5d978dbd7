"""Planner: makes the plan of each round before its batch, and learns from the round after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.control.acceptance import Acceptance
from engine.control.goodput import Goodput, Reason
from engine.protocols import Draft, Drafter, Overlapping, PlansCopies, ProposeRow, Request, ScheduledRow, Verdict


@dataclass(frozen=True, slots=True)
class RoundSeconds:
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
        num_draft_tokens: the length of drafts that are neither copies nor fixed by their requests.
        reason: why this length; `request` if all requests fix theirs, and this is the longest.
        copies: the lengths of drafts that are copies, by request id.
        limits: the longest draft of each decoding request whose length is not fixed.
        is_measured: whether the round's time measures `num_draft_tokens`; fixed lengths, copies and prompts would
            distort it.
    """

    num_draft_tokens: int
    reason: Reason = "goodput"
    copies: Mapping[str, int] = field(default_factory=dict)
    limits: Sequence[int] = ()
    is_measured: bool = False

    def length_of(self, request: Request) -> int:
        """Return the longest draft that a request may get."""
        return _limit(request, self.copies.get(request.request_id, self.num_draft_tokens))

    def decides(self, request: Request) -> bool:
        """Return whether the plan chose the length of a request's draft, which is then neither fixed nor a copy's."""
        return not request.params.fixes_draft_length and request.request_id not in self.copies


class Planner:
    """Chooses draft lengths by measured goodput, within the limits and fixed lengths of requests, and plans copies."""

    def __init__(
        self, config: EngineConfig, acceptance: Acceptance, drafter: Drafter, remote: Overlapping | None = None
    ) -> None:
        self.max_draft_tokens = 0 if config.speculation == "off" else config.num_speculative_tokens
        self.goodput = Goodput(self.max_draft_tokens, acceptance, config.speculation)
        self._copier = drafter if isinstance(drafter, PlansCopies) else None

    def choose_cohorts(self, num_decoding: int) -> int:
        """Choose what the drafter does while the target verifies, for so many requests; return the number of cohorts.

        With two, their rounds alternate: one is drafted for while the target verifies the other.
        """
        return 1

    def plan(self, decoding: Sequence[Request], *, has_prompts: bool) -> Plan:
        """Plan the next round, given the requests that can get drafts and whether it will compute prompts, too."""
        free = [request for request in decoding if not request.params.fixes_draft_length]
        limits = [_limit(request, self.max_draft_tokens) for request in free]
        copies: Mapping[str, int] = {}
        if self._copier is not None:
            rows = [ProposeRow(request, limit) for request, limit in zip(free, limits, strict=True)]
            copies = self._copier.plan_copies(rows, self.goodput.gains)
        is_measured = len(free) == len(decoding) and not copies and not has_prompts
        length, reason = self.goodput.choose(limits, is_measured=is_measured)
        if decoding and not free:
            length, reason = max(_limit(request, self.max_draft_tokens) for request in decoding), "request"
        return Plan(length, reason, copies, limits, is_measured)

    def trim(self, plan: Plan, batch: Sequence[ScheduledRow], drafts: Sequence[Draft]) -> list[Draft]:
        """Return the drafts of a batch, one per row, without the nodes that are not worth their place in the pass."""
        return list(drafts)

    def observe(
        self, plan: Plan, batch: Sequence[ScheduledRow], verdicts: Sequence[Verdict], seconds: RoundSeconds
    ) -> None:
        """Learn acceptance and round times from a round."""
        for row, verdict in zip(batch, verdicts, strict=True):
            if plan.decides(row.request):
                self.goodput.acceptance.observe(row.num_draft_tokens, verdict.path)
        if plan.is_measured and len(batch) == len(plan.limits):
            self.goodput.observe(plan.limits, seconds.total_s)


def _limit(request: Request, length: int) -> int:
    limit = request.params.num_speculative_tokens
    if limit is None:
        return length
    return limit if request.params.fixes_draft_length else min(limit, length)
