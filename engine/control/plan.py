"""Planner: how many draft tokens each request gets in a round, and which of the drafted ones are verified.

Each token that a request could get is scored by its survival, and a budget of them is taken: before drafting, by what
is known of the requests, which gives each a length; after it, by the drafter's confidences, which cuts the drafts. In a
round in which no draft pays, there is none, and it costs what plain decoding does. A request whose drafts do not pay
takes part in trials, and while others have drafts, it gets a single token now and then.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

from engine.config import EngineConfig
from engine.control.budget import Budget, best_budget, cut_drafts, lengths_within
from engine.control.overlap import OverlapChoice
from engine.control.round_cost import RoundCost
from engine.control.survival import History, Prior, Survival
from engine.control.trials import Trials
from engine.protocols import (
    Draft,
    Drafter,
    Overlap,
    Overlapping,
    PlansCopies,
    ProposeRow,
    Request,
    ScheduledRow,
    Verdict,
)

Reason = Literal["fixed", "off", "goodput", "trial", "request"]

_LENGTHS = (*range(9), 10, 12, 16, 24, 32, 48, 64)
_LONGEST_PAUSE = 256
"""Rounds between two single tokens of a request whose drafts do not pay; at first 2, then twice the last."""
_REMEMBERED_ROUNDS = 512
_THOROUGH_EVERY = 8
"""Rounds between two that look at all lengths, and not only at those next to the last one."""


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
        num_draft_tokens: the longest draft that is neither a copy nor fixed by its request; requests without a length
            of their own get this one.
        reason: why this length; `request` if all requests fix theirs, and this is the longest.
        copies: the lengths of drafts that are copies, by request id.
        lengths: the lengths of other drafts, by request id.
        tried: requests whose drafts are not cut, because they are to be measured.
        overlap: what the drafter does meanwhile.
        num_expected: how many tokens the requests are expected to commit, of those whose lengths are chosen here.
    """

    num_draft_tokens: int
    reason: Reason = "goodput"
    copies: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    tried: AbstractSet[str] = frozenset()
    overlap: Overlap = "none"
    num_expected: float = 0.0

    def length_of(self, request: Request) -> int:
        """Return the longest draft that a request may get."""
        name = request.request_id
        return _limit(request, self.copies.get(name, self.lengths.get(name, self.num_draft_tokens)))


class _Row(NamedTuple):
    """A request whose draft's length is chosen, and the survival of its tokens, up to the longest that it may have."""

    name: str
    history: History
    survival: list[float]
    is_copy: bool

    def part(self, depth: int) -> list[float]:
        """Return the survival of the tokens up to a depth; a copy takes no time to draft, so it is whole at any."""
        return self.survival if self.is_copy else self.survival[:depth]


class Planner:
    """Plans each round before its batch, cuts its drafts, and learns from it.

    Attributes:
        max_draft_tokens: the longest draft that is no copy.
        num_draft_tokens: the longest draft that the last plan allowed.
        survival: how likely draft tokens are accepted.
        costs: how long rounds take.
    """

    def __init__(self, config: EngineConfig, prior: Prior, drafter: Drafter, remote: Overlapping | None = None) -> None:
        self.max_draft_tokens = 0 if config.speculation == "off" else config.num_speculative_tokens
        self.num_draft_tokens = self._depth = self.max_draft_tokens
        self.survival = Survival(prior)
        self.costs = RoundCost()
        self._is_adaptive = config.speculation == "adaptive" and self.max_draft_tokens > 0
        self._copier = drafter if isinstance(drafter, PlansCopies) else None
        self._remote = remote
        self._overlaps = OverlapChoice(remote, self.costs) if remote is not None and self.max_draft_tokens else None
        self._trials = Trials()
        self._mean_survival: Sequence[float] = prior.gains
        self._num_rounds = self._num_prompt_tokens = 0
        self._is_steady = False
        """Whether the last round had drafts and no prompts, so that the drafter has nothing to catch up with."""

    def choose_cohorts(self, num_decoding: int) -> int:
        """Choose what the drafter does while the target verifies, for so many requests; return the number of cohorts.

        With two, their rounds alternate: one is drafted for while the target verifies the other.
        """
        if self._overlaps is None:
            return 1
        return self._overlaps.choose(num_decoding, self._mean_survival, is_fixed=not self._is_adaptive)

    def plan(self, decoding: Sequence[Request], *, has_prompts: bool) -> Plan:
        """Plan the next round, given the requests that can get drafts and whether it will compute prompts, too."""
        self._num_rounds += 1
        if self._num_rounds % _REMEMBERED_ROUNDS == 0:
            self.survival.forget(self._num_rounds - _REMEMBERED_ROUNDS)
        free = [request for request in decoding if not request.params.fixes_draft_length]
        copies: Mapping[str, int] = {}
        if self._copier is not None:
            copying = [ProposeRow(request, _limit(request, self.max_draft_tokens)) for request in free]
            copies = self._copier.plan_copies(copying, {row.request.request_id: self._expected(row) for row in copying})
        overlap = self._remote.overlap if self._remote is not None else "none"
        if decoding and not free:
            length = max(_limit(request, self.max_draft_tokens) for request in decoding)
            return Plan(length, "request", overlap=overlap)
        if not self._is_adaptive or not free:
            reason: Reason = "goodput" if self._is_adaptive else "fixed" if self.max_draft_tokens else "off"
            return Plan(self.num_draft_tokens, reason, copies, overlap=overlap)
        rows = [self._row(request, copies.get(request.request_id)) for request in free]
        if self._num_rounds % _THOROUGH_EVERY == 1:
            self._mean_survival = _mean([row.survival for row in rows], self.max_draft_tokens)
        num_tokens = len(decoding) + sum(_limit(r, 0) for r in decoding if r.params.fixes_draft_length)
        plan = self._choose(rows, num_tokens, len(decoding), overlap, has_prompts=has_prompts)
        self.num_draft_tokens = plan.num_draft_tokens
        return plan

    def trim(self, plan: Plan, batch: Sequence[ScheduledRow], drafts: Sequence[Draft]) -> list[Draft]:
        """Return the drafts of a batch without the nodes that are not worth their place in the pass.

        A draft that carries the distributions it was sampled from is never cut: the rules that need them assume that
        its length does not depend on what was drawn.
        """
        cut, places, survivals, num_tokens = list(drafts), [], [], 0
        for i, (row, draft) in enumerate(zip(batch, drafts, strict=True)):
            num_tokens += row.length + draft.num_deferred
            is_free = not row.request.params.fixes_draft_length and row.request.request_id not in plan.tried
            if draft.token_ids and draft.top_ids is None and is_free:
                places.append(i)
                survivals.append(self.survival.after(self._history(plan, row, draft), draft))
            else:
                num_tokens += len(draft.token_ids)
        if not self._is_adaptive or not places:
            return cut
        slots = list(chain.from_iterable(survivals))
        passes = self.costs.passes.seconds(num_tokens, len(slots))
        seconds = self.costs.seconds(plan.overlap, len(batch), plan.num_draft_tokens, passes)
        num_ending = sum(row.start + row.length == len(row.request.token_ids) for row in batch)
        budget = best_budget(num_ending, slots, seconds)
        if budget.num_slots < sum(map(len, survivals)):
            shorter = cut_drafts(budget, [drafts[i] for i in places], survivals)
            for i, draft in zip(places, shorter, strict=True):
                cut[i] = draft
        return cut

    def observe(
        self, plan: Plan, batch: Sequence[ScheduledRow], verdicts: Sequence[Verdict], seconds: RoundSeconds
    ) -> None:
        """Learn acceptance and round times from a round."""
        num_tokens = num_prompt_tokens = depth = 0
        for row, verdict in zip(batch, verdicts, strict=True):
            num_tokens += row.length + len(verdict.draft.token_ids)
            num_prompt_tokens += row.length - 1
            if row.num_draft_tokens:
                self.survival.observe(self._history(plan, row, verdict.draft), verdict.draft, verdict.path)
                if row.request.request_id not in plan.copies:
                    depth = max(depth, row.num_draft_tokens)
        self._trials.clock += seconds.total_s
        self.costs.passes.observe(num_tokens, seconds.verify_s)
        was_steady, self._is_steady = self._is_steady, depth > 0 and not num_prompt_tokens
        if num_prompt_tokens:
            self._num_prompt_tokens = num_prompt_tokens
        else:
            if self._overlaps is not None and plan.reason != "trial":
                num_expected = plan.num_expected or sum(len(verdict.token_ids) for verdict in verdicts)
                self._overlaps.observe(plan.overlap, num_expected, seconds.total_s)
            self.costs.observe(
                plan.overlap,
                len(batch),
                depth if was_steady else 0,
                total_s=seconds.total_s,
                draft_s=seconds.draft_s,
                verify_s=seconds.verify_s,
            )

    def _expected(self, row: ProposeRow) -> float:
        """Return how many tokens of a draft that is no copy are expected to be accepted, of the length chosen last."""
        history = self.survival.history(row.request, self._num_rounds)
        return sum(self.survival.before(history, min(row.num_draft_tokens, self.num_draft_tokens)))

    def _history(self, plan: Plan, row: ScheduledRow, draft: Draft) -> History:
        is_copy = draft.is_predicted or row.request.request_id in plan.copies
        return self.survival.history(row.request, self._num_rounds, is_copy=is_copy)

    def _row(self, request: Request, copied: int | None) -> _Row:
        """Return the row of a request, which copies so many tokens or, if None, gets another draft."""
        history = self.survival.history(request, self._num_rounds, is_copy=copied is not None)
        length = _limit(request, self.max_draft_tokens) if copied is None else copied
        return _Row(request.request_id, history, self.survival.before(history, length), copied is not None)

    def _choose(
        self, rows: Sequence[_Row], num_tokens: int, num_decoding: int, overlap: Overlap, *, has_prompts: bool
    ) -> Plan:
        """Choose the lengths of some rows; the pass has `num_tokens` without their drafts and without prompts."""
        longest = max((len(row.survival) for row in rows if not row.is_copy), default=0)
        ladder = sorted({k for k in _LENGTHS if k < longest} | {longest})
        num_tokens += self._num_prompt_tokens if has_prompts else 0
        passes = self.costs.passes.seconds(num_tokens, sum(len(row.survival) for row in rows))

        def budget_of(depth: int) -> Budget:
            survivals = list(chain.from_iterable(row.part(depth) for row in rows))
            return best_budget(num_decoding, survivals, self.costs.seconds(overlap, num_decoding, depth, passes))

        def promise(length: int) -> tuple[float, float]:
            parts = [row.part(length) for row in rows]
            num_slots = sum(map(len, parts))
            (seconds,) = self.costs.seconds(overlap, num_decoding, length, passes[num_slots : num_slots + 1])
            return num_decoding + sum(map(sum, parts)), seconds

        near = bisect_right(ladder, self._depth) - 1
        is_thorough = self._num_rounds % _THOROUGH_EVERY == 1 or self._depth > longest
        depths = ladder if is_thorough else sorted({0, *ladder[max(0, near - 1) : near + 2]})
        depth, budget = max(((depth, budget_of(depth)) for depth in depths), key=lambda each: each[1].rate)
        lengths = lengths_within(budget, [row.part(depth) for row in rows])
        length = max((length for row, length in zip(rows, lengths, strict=True) if not row.is_copy), default=0)
        self._depth = length
        load, tried = (overlap, (num_decoding - 1).bit_length()), set[str]()
        reason: Reason = "goodput"
        trial = None if has_prompts else self._trials.choose(load, ladder, length, budget, promise)
        if trial is not None:
            length, reason, lengths = trial, "trial", [len(row.part(trial)) for row in rows]
            tried.update(row.name for row in rows if not row.is_copy)
        for i, row in enumerate(rows):
            if lengths[i]:
                row.history.pause = row.history.pause if trial else 1
                continue
            if not length:
                row.history.before.fade()
            elif row.survival and row.history.due <= self._num_rounds:
                row.history.pause = min(2 * row.history.pause, _LONGEST_PAUSE)
                row.history.due = self._num_rounds + row.history.pause
                lengths[i] = 1
                tried.add(row.name)
        by_name = [(row.name, length, row.is_copy) for row, length in zip(rows, lengths, strict=True)]
        copies = {name: length for name, length, is_copy in by_name if is_copy}
        others = {name: length for name, length, is_copy in by_name if not is_copy}
        return Plan(length, reason, copies, others, tried, overlap, budget.num_tokens)


def _mean(rows: Sequence[Sequence[float]], longest: int) -> list[float]:
    return [sum(row[i] for row in rows if i < len(row)) / len(rows) for i in range(longest)]


def _limit(request: Request, length: int) -> int:
    limit = request.params.num_speculative_tokens
    if limit is None:
        return length
    return limit if request.params.fixes_draft_length else min(limit, length)
