"""Planner: how many draft tokens each request gets in a round.

Each possible draft token is scored by its survival, and `best_budget` takes the tokens that pay, which gives each
request a length. If no draft pays, the round is plain decoding. A request whose drafts do not pay takes part in trials,
and gets a single draft token now and then.

Drafts are not cut after they are drawn: cutting the tokens of low confidence made 0.90 of the tokens per second where
each token makes a pass longer, and took the host 1 ms more for 32 requests.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.control.acceptance import PRIOR
from engine.control.budget import best_budget
from engine.control.costs import RoundCost
from engine.control.overlap import OverlapChoice
from engine.control.plan import Plan, Reason, RoundSeconds, limited
from engine.control.survival import Survival
from engine.control.trials import Trials
from engine.protocols import Drafter, Overlap, PlansCopies, ProposeRow, Request, ScheduledRow, Verdict

_PROBE_ROUNDS = 64
"""Rounds between two probes, in which requests whose drafts do not pay get a single draft token. With 32: 0.99 of the
tokens per second of a load that changes every 40 rounds."""
_REMEMBERED_ROUNDS = 512
_HELD_ROUNDS = 4
"""Rounds of the same requests that reuse a plan, because planning takes 180 us for 8 requests."""


class Planner:
    """Plans each round before its batch, and learns from it.

    Attributes:
        max_draft_tokens: the longest draft, copies apart.
        num_draft_tokens: `Plan.num_draft_tokens` of the last plan.
        num_tokens_by_draft: draft tokens by draft index and outcome: those that were verified, and those accepted.
    """

    def __init__(
        self, config: EngineConfig, num_chains: int, drafter: Drafter, overlaps: Collection[Overlap] = ()
    ) -> None:
        self.max_draft_tokens = self.num_draft_tokens = config.max_draft_tokens
        self.num_tokens_by_draft: Counter[tuple[int, str]] = Counter()
        self.survival = Survival(config.num_speculative_tokens, num_chains, config.num_drafts)
        self.costs = RoundCost()
        self._is_adaptive = config.speculation == "adaptive" and self.max_draft_tokens > 0
        self._copier = drafter if isinstance(drafter, PlansCopies) else None
        self._overlaps = OverlapChoice(overlaps, self.costs) if overlaps and self.max_draft_tokens else None
        self._trials = Trials()
        self._gains = [PRIOR ** (1 + place) for place in range(self.max_draft_tokens)]
        self._num_rounds = self._num_prompt_tokens = self._probe_due = 0
        self._held: dict[Hashable, tuple[int, Plan]] = {}
        self._is_steady = False
        """Whether the last round had drafts and no prompts, so that the drafter has nothing to catch up with."""

    def choose_cohorts(self, num_decoding: int) -> int:
        """Choose run-ahead, alternation or neither; return the number of cohorts: 2 for alternation, else 1."""
        if self._overlaps is None:
            return 1
        return self._overlaps.choose(num_decoding, self._gains, is_fixed=not self._is_adaptive)

    def plan(self, decoding: Sequence[Request], *, has_prompts: bool) -> Plan:
        """Plan the next round, given the requests that can get drafts and whether it also computes prompts."""
        self._num_rounds += 1
        if self._num_rounds % _REMEMBERED_ROUNDS == 0:
            self.survival.forget()
        overlap = self._overlaps.overlap if self._overlaps is not None else "none"
        free = [request for request in decoding if not request.params.fixes_draft_length]
        copies = self._copies(free)
        if decoding and not free:
            return Plan(max(limited(request, 0) for request in decoding), "request", overlap=overlap)
        if not self._is_adaptive or not free:
            reason: Reason = "goodput" if self._is_adaptive else "fixed" if self.max_draft_tokens else "off"
            return Plan(self.num_draft_tokens, reason, copies, overlap=overlap)
        key = overlap, has_prompts, tuple(request.request_id for request in decoding)
        planned, plan = self._held.get(key, (-_HELD_ROUNDS, Plan(0)))
        if copies or self._num_rounds >= planned + _HELD_ROUNDS:
            num_tokens = len(decoding) + sum(limited(r, 0) for r in decoding if r.params.fixes_draft_length)
            num_tokens += self._num_prompt_tokens if has_prompts else 0
            plan, may_hold = self._choose(free, copies, num_tokens, len(decoding), overlap, has_prompts=has_prompts)
            if len(self._held) > 1:
                self._held.clear()
            if may_hold:
                self._held[key] = self._num_rounds, plan
        self.num_draft_tokens = plan.num_draft_tokens
        return plan

    def observe(
        self, plan: Plan, batch: Sequence[ScheduledRow], verdicts: Sequence[Verdict], seconds: RoundSeconds
    ) -> None:
        """Learn acceptance and round times from a round."""
        num_tokens = num_prompt_tokens = depth = 0
        for row, verdict in zip(batch, verdicts, strict=True):
            num_tokens += row.length + len(verdict.draft.token_ids)
            num_prompt_tokens += row.length - 1
            if row.request.params.audits:
                num_prompt_tokens += row.num_draft_tokens  # it takes the time of a prompt, and says nothing of drafts
            elif row.num_draft_tokens:
                is_copy = row.request.request_id in plan.copies
                history = self.survival.history(row.request, is_copy=is_copy or verdict.draft.is_predicted)
                self.survival.observe(history, verdict.draft, verdict.path, row.draft_index)
                if not is_copy:
                    self.num_tokens_by_draft[row.draft_index, "verified"] += len(verdict.draft.token_ids)
                    self.num_tokens_by_draft[row.draft_index, "accepted"] += verdict.num_accepted
                    depth = max(depth, row.num_draft_tokens)
        self._trials.clock += seconds.total_s
        self.costs.passes.observe(num_tokens, seconds.verify_s)
        was_steady, self._is_steady = self._is_steady, depth > 0 and not num_prompt_tokens
        if num_prompt_tokens:
            self._num_prompt_tokens = num_prompt_tokens
            return
        self.costs.observe(plan.overlap, len(batch), depth if was_steady else 0, seconds)
        if self._overlaps is not None and plan.reason != "trial":
            num_expected = plan.num_expected or sum(len(verdict.token_ids) for verdict in verdicts)
            self._overlaps.observe(plan.overlap, num_expected, seconds.total_s)

    def _copies(self, free: Sequence[Request]) -> Mapping[str, int]:
        if self._copier is None:
            return {}
        rows = [ProposeRow(request, limited(request, self.max_draft_tokens)) for request in free]
        chances = self.survival.chances([self.survival.history(request) for request in free], self.num_draft_tokens)
        expected = {
            row.request.request_id: float(gains[: row.num_draft_tokens].sum())
            for row, gains in zip(rows, chances, strict=True)
        }
        return self._copier.plan_copies(rows, expected)

    def _choose(
        self,
        free: Sequence[Request],
        copies: Mapping[str, int],
        num_tokens: int,
        num_decoding: int,
        overlap: Overlap,
        *,
        has_prompts: bool,
    ) -> tuple[Plan, bool]:
        """Return a plan, and whether the next rounds may reuse it; the pass has `num_tokens` without drafts."""
        names = [request.request_id for request in free]
        limits = np.array([copies.get(r.request_id, limited(r, self.max_draft_tokens)) for r in free])
        is_copy = np.array([name in copies for name in names])
        histories = [self.survival.history(request, is_copy=request.request_id in copies) for request in free]
        chances = self.survival.chances(histories, int(limits.max()))
        places = np.arange(chances.shape[1])
        chances[places >= limits[:, None]] = 0.0
        self._gains = chances.mean(0)[: self.max_draft_tokens].tolist()
        longest = int(limits[~is_copy].max(initial=0))
        passes = self.costs.passes.seconds(num_tokens + np.arange(chances.size + 1))
        seconds = self.costs.seconds(overlap, num_decoding, np.arange(longest + 1)[:, None], passes)
        depths = np.where(is_copy[:, None], 0, 1 + places)  # a copy takes no time to draft
        budget = best_budget(num_decoding, chances, depths, seconds)
        lengths = budget.lengths
        length = best = int(lengths[~is_copy].max(initial=0))

        def tried(length: int) -> NDArray[np.int64]:
            """Return the lengths of a trial; requests without a draft get none, unless no request has a draft."""
            return np.where(is_copy, limits, np.minimum(limits, length) * ((lengths > 0) | (best == 0)))

        def cost(length: int) -> tuple[float, float]:
            """Return the seconds of a round of a trial, and how many seconds the trial loses against the budget."""
            num_draft_tokens = tried(length)
            tokens = num_decoding + chances[places < num_draft_tokens[:, None]].sum()
            pass_s = self.costs.passes.seconds(num_tokens + num_draft_tokens.sum())
            round_s = float(self.costs.seconds(overlap, num_decoding, length, pass_s))
            return round_s, round_s - tokens / budget.rate

        others = [k for k in (0, length // 2, min(length + 1 + length // 4, longest), longest) if k != length]
        load = overlap, num_decoding.bit_length()
        reason: Reason = "goodput"
        trial = None if has_prompts else self._trials.choose(load, others, cost)
        probes = best > 0 and self._num_rounds >= self._probe_due
        if trial is not None:
            length, reason, lengths = trial, "trial", tried(trial)
        elif probes:
            self._probe_due = self._num_rounds + _PROBE_ROUNDS
            lengths = np.maximum(lengths, np.minimum(limits, 1))
        by_name = dict(zip(names, lengths.tolist(), strict=True))
        copied = {name: by_name.pop(name) for name in copies}
        plan = Plan(length, reason, copied, by_name, overlap, budget.num_tokens)
        return plan, not (copies or probes or trial is not None)
