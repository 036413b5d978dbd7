"""OverlapChoice: what the drafter does while the target verifies, by the most tokens per second.

Run-ahead hides a draft whose verdict it foresees, which is likely for few rows; alternation hides it wholly, and pays
once half the rows take much less time than all. The learned costs of a round say which overlap is worth a trial. A
window of rounds measures it against the window before, and the better one stays.
"""

from collections.abc import Collection, Sequence

import numpy as np

from engine.control.costs import RoundCost
from engine.protocols import Overlap

_WINDOW = 24
_SKIPPED = 4
"""Rounds that are measured, after those in which an overlap begins. With 36: 16.1 thousand tokens/s instead of 16.4
(8B, 64 rows)."""
_HOPEFUL = 0.85
"""An overlap is tried if it promises at least this much of what the best one does: half the rows may cost less. If
all are tried: 3525 tokens/s instead of 3574 (8B, 8 rows)."""
_PAUSE_ROUNDS = 3000
"""Rounds until an overlap is tried again."""


class OverlapChoice:
    """Chooses before each round, of the overlaps that a drafter is able to.

    Attributes:
        overlap: the last choice.
    """

    def __init__(self, overlaps: Collection[Overlap], costs: RoundCost) -> None:
        self.overlap: Overlap = "none"
        self._overlaps = overlaps
        self._costs = costs
        self._best: dict[int, Overlap] = {}
        self._due: dict[tuple[int, Overlap], int] = {}
        self._load = self._num_rounds = self._num_measured = 0
        self._tokens = self._seconds = self._best_rate = 0.0

    def choose(self, num_rows: int, gains: Sequence[float], *, is_fixed: bool) -> int:
        """Choose for so many rows, given a row's mean survival by place; return the number of cohorts.

        Args:
            is_fixed: whether drafts always have the full length.
        """
        self._num_rounds += 1
        num_rows = max(1, num_rows)
        load = num_rows.bit_length()
        if load != self._load or self._num_measured >= _SKIPPED + _WINDOW:
            possible = [overlap for overlap in self._overlaps if num_rows > 1 or overlap != "alternate"]
            rates = {overlap: self.rate(overlap, num_rows, gains, is_fixed=is_fixed) for overlap in possible}
            best = self._best.setdefault(load, max(rates, key=rates.__getitem__, default="none"))
            self.overlap = best if load != self._load else self._measured(rates)
            self._load, self._num_measured, self._tokens, self._seconds = load, 0, 0.0, 0.0
        return 2 if self.overlap == "alternate" else 1

    def observe(self, overlap: Overlap, num_tokens: float, seconds: float) -> None:
        """Record a round that computed no prompt, with its expected tokens."""
        self._num_measured += overlap == self.overlap
        if self._num_measured > _SKIPPED:
            self._tokens += num_tokens
            self._seconds += seconds

    def rate(self, overlap: Overlap, num_rows: int, gains: Sequence[float], *, is_fixed: bool) -> float:
        """Return the most tokens per second that an overlap promises, over the lengths that drafts may have."""
        rows = (num_rows + 1) // 2 if overlap == "alternate" else num_rows
        lengths = np.arange(len(gains) + 1)
        passes = self._costs.passes.seconds(rows * (1 + lengths))
        tokens = rows * np.cumsum([1.0, *gains])
        rates = tokens / self._costs.seconds(overlap, rows, lengths, passes)
        return float(rates[-1] if is_fixed else rates.max())

    def _measured(self, rates: dict[Overlap, float]) -> Overlap:
        """Return the overlap of the next window: the best one, or a trial of another."""
        best, rate = self._best[self._load], self._tokens / self._seconds
        if self.overlap != best:
            if rate > self._best_rate:
                self._best[self._load] = self.overlap
            return self._best[self._load]
        self._best_rate = rate
        due = [other for other in rates if self._due.get((self._load, other), 0) <= self._num_rounds]
        for overlap in sorted(due, key=rates.__getitem__, reverse=True):
            if overlap != best and rates[overlap] > _HOPEFUL * rates[best]:
                self._due[self._load, overlap] = self._num_rounds + _PAUSE_ROUNDS
                return overlap
        return best
