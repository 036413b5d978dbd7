"""Planner: how many draft tokens each request gets in a round.

Each token that a request could get is scored by its survival, as far as that is known of the request, and a budget of
them is taken, which gives each request a length. In a round in which no draft pays, there is none, and it costs what
plain decoding does. A request whose drafts do not pay takes part in trials, and while others have drafts, it gets a
single token now and then.

Why drafts are not cut once they are drawn: where a pass takes longer with each token, cutting the tokens of which the
drafter was not confident made 0.90 of the tokens per second, and took the host 1 ms more in a round of 32 requests.
"""

from bisect import bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import chain

from engine.config import EngineConfig
from engine.control.budget import Budget, best_budget
from engine.control.overlap import OverlapChoice
from engine.control.plan import Plan, Reason, RoundSeconds, limited
from engine.control.round_cost import RoundCost
from engine.control.survival import History, Prior, Survival
from engine.control.trials import Trials
from engine.protocols import (
    Draft,
    Drafter,
    Overlap,
    PlansCopies,
    ProposeRow,
    Request,
    ScheduledRow,
    Verdict,
)

_LENGTHS = (*range(9), 10, 12, 16, 24, 32, 48, 64)
_LONGEST_PAUSE = 256
"""Rounds between two single tokens of a request whose drafts do not pay; at first 2, then twice the last."""
_RETURNS = 0.1
"""The first token of such a request gets drafts again once it is likelier than this."""
_REMEMBERED_ROUNDS = 512
_THOROUGH_EVERY = 8
"""Rounds between two that look at all lengths, and not only at those next to the last one."""
_HELD_ROUNDS = 4
"""A plan holds for so many rounds of the same requests."""


class Planner:
    """Plans each round before its batch, and learns from it.

    Attributes:
        max_draft_tokens: the longest draft that is no copy.
        num_draft_tokens: the longest draft that the last plan allowed.
        survival: how likely draft tokens are accepted.
        costs: how long rounds take.
    """

    def __init__(
        self, config: EngineConfig, prior: Prior, drafter: Drafter, overlaps: Collection[Overlap] = ()
    ) -> None:
        self.max_draft_tokens = config.max_draft_tokens
        self.num_draft_tokens = self._depth = self.max_draft_tokens
        self.survival = Survival(prior)
        self.costs = RoundCost()
        self._is_adaptive = config.speculation == "adaptive" and self.max_draft_tokens > 0
        self._copier = drafter if isinstance(drafter, PlansCopies) else None
        self._overlaps = OverlapChoice(overlaps, self.costs) if overlaps and self.max_draft_tokens else None
        self._trials = Trials()
        self._mean_survival: Sequence[float] = prior.gains
        self._num_rounds = self._num_prompt_tokens = self._thorough_due = 0
        self._held: dict[Hashable, tuple[int, Plan]] = {}
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
        self._num_rounds = self._trials.num_rounds = self._num_rounds + 1
        if self._num_rounds % _REMEMBERED_ROUNDS == 0:
            self.survival.forget(self._num_rounds - _REMEMBERED_ROUNDS)
        free = [request for request in decoding if not request.params.fixes_draft_length]
        copies: Mapping[str, int] = {}
        if self._copier is not None:
            rows = [ProposeRow(request, limited(request, self.max_draft_tokens)) for request in free]
            copies = self._copier.plan_copies(rows, {row.request.request_id: self._expected(row) for row in rows})
        overlap = self._overlaps.overlap if self._overlaps is not None else "none"
        if decoding and not free:
            length = max(limited(request, self.max_draft_tokens) for request in decoding)
            return Plan(length, "request", overlap=overlap)
        if not self._is_adaptive or not free:
            reason: Reason = "goodput" if self._is_adaptive else "fixed" if self.max_draft_tokens else "off"
            return Plan(self.num_draft_tokens, reason, copies, overlap=overlap)
        key = overlap, has_prompts, tuple(request.request_id for request in decoding)
        planned, plan = self._held.get(key, (-_HELD_ROUNDS, Plan(0)))
        if not copies and self._num_rounds < planned + _HELD_ROUNDS:
            return plan
        num_tokens = len(decoding) + sum(limited(r, 0) for r in decoding if r.params.fixes_draft_length)
        num_tokens += self._num_prompt_tokens if has_prompts else 0
        plan = self._choose(free, copies, num_tokens, len(decoding), overlap, has_prompts=has_prompts)
        self.num_draft_tokens = plan.num_draft_tokens
        if len(self._held) > 1:
            self._held.clear()
        if plan.reason == "goodput" and not plan.tries_rows and not copies:
            self._held[key] = self._num_rounds, plan
        return plan

    def observe(
        self, plan: Plan, batch: Sequence[ScheduledRow], verdicts: Sequence[Verdict], seconds: RoundSeconds
    ) -> None:
        """Learn acceptance and round times from a round."""
        num_tokens = num_prompt_tokens = depth = 0
        for row, verdict in zip(batch, verdicts, strict=True):
            num_tokens += row.length + len(verdict.draft.token_ids)
            num_prompt_tokens += row.length - 1
            if row.num_draft_tokens:
                history = self._history(plan, row, verdict.draft)
                self.survival.observe(history, verdict.draft, verdict.path)
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

    def _history(self, plan: Plan, row: ScheduledRow, draft: Draft) -> History:
        is_copy = draft.is_predicted or row.request.request_id in plan.copies
        return self.survival.history(row.request, self._num_rounds, is_copy=is_copy)

    def _expected(self, row: ProposeRow) -> float:
        """Return how many tokens of a draft that is no copy are expected to be accepted, of the length chosen last."""
        history = self.survival.history(row.request, self._num_rounds)
        return sum(self.survival.chances(history, min(row.num_draft_tokens, self.num_draft_tokens)))

    def _choose(
        self,
        free: Sequence[Request],
        copies: Mapping[str, int],
        num_tokens: int,
        num_decoding: int,
        overlap: Overlap,
        *,
        has_prompts: bool,
    ) -> Plan:
        """Choose the lengths of some requests' drafts; the pass has `num_tokens` without them."""
        names = [request.request_id for request in free]
        histories = [self.survival.history(r, self._num_rounds, is_copy=r.request_id in copies) for r in free]
        most = [copies.get(r.request_id, limited(r, self.max_draft_tokens)) for r in free]
        longest = max((limit for name, limit in zip(names, most, strict=True) if name not in copies), default=0)
        ladder = sorted({k for k in _LENGTHS if k < longest} | {longest})
        is_thorough = self._num_rounds >= self._thorough_due or self._depth > longest
        near = bisect_right(ladder, self._depth)
        depths = ladder if is_thorough else sorted({0, *ladder[max(0, near - 2) : near + 1]})
        survivals = [
            self.survival.chances(history, limit if history.is_copy else min(limit, depths[-1]))
            for history, limit in zip(histories, most, strict=True)
        ]
        survivals = [
            row if history.pause == 1 or (row and row[0] > _RETURNS) else []
            for history, row in zip(histories, survivals, strict=True)
        ]
        if is_thorough:
            self._thorough_due = self._num_rounds + _THOROUGH_EVERY
            self._mean_survival = _mean(survivals, self.max_draft_tokens)
        passes = self.costs.passes.seconds(num_tokens, sum(map(len, survivals)))

        def parts(depth: int) -> list[list[float]]:
            """Return the survival of tokens up to a depth; a copy takes no time to draft, so it is whole at any."""
            return [row if history.is_copy else row[:depth] for history, row in zip(histories, survivals, strict=True)]

        def budget_of(depth: int) -> Budget:
            seconds = self.costs.seconds(overlap, num_decoding, depth, passes)
            return best_budget(num_decoding, list(chain.from_iterable(parts(depth))), seconds)

        depth, budget = max(((depth, budget_of(depth)) for depth in depths), key=lambda each: each[1].rate)
        owners = [i for i, row in enumerate(parts(depth)) for _ in row]
        lengths = [0] * len(free)
        for slot in budget.chosen:
            lengths[owners[slot]] += 1
        self._depth = length = max((k for k, h in zip(lengths, histories, strict=True) if not h.is_copy), default=0)

        def tries(length: int) -> list[int]:
            """Return what rows get in a trial: those that have no drafts now have none, unless none has."""
            return [
                limit if history.is_copy else min(limit, length) if used or not self._depth else 0
                for history, limit, used in zip(histories, most, lengths, strict=True)
            ]

        def promise(length: int) -> tuple[float, float]:
            tried = tries(length)
            tokens = sum(sum(self.survival.chances(h, k)) for h, k in zip(histories, tried, strict=True))
            pass_s = self.costs.passes.seconds(num_tokens + sum(tried))
            (seconds,) = self.costs.seconds(overlap, num_decoding, length, pass_s)
            return num_decoding + tokens, seconds

        load, tries_rows = (overlap, (num_decoding - 1).bit_length()), False
        reason: Reason = "goodput"
        trial = None if has_prompts else self._trials.choose(load, ladder, length, budget, promise)
        if trial is not None:
            length, reason, lengths = trial, "trial", tries(trial)
        for i, history in enumerate(histories):
            if lengths[i]:
                history.pause = history.pause if lengths[i] == 1 else 1
                continue
            history.offset.fade()
            if length and most[i] and history.due <= self._num_rounds:
                history.pause = min(2 * history.pause, _LONGEST_PAUSE)
                history.due = self._num_rounds + history.pause
                lengths[i] = 1
                tries_rows = True
        by_name = dict(zip(names, lengths, strict=True))
        copied = {name: by_name.pop(name) for name in copies}
        return Plan(length, reason, copied, by_name, tries_rows, overlap, budget.num_tokens)


def _mean(rows: Sequence[Sequence[float]], longest: int) -> list[float]:
    return [sum(row[i] for row in rows if i < len(row)) / len(rows) for i in range(longest)]
