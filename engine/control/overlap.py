"""OverlapChoice: chooses run-ahead, alternation or neither, by tokens per second.

Run-ahead hides a draft's time if it foresees the verdict, which is likely for few rows. Alternation always hides it,
but pays only if a pass over half of the rows takes much less time. The learned costs of rounds show which overlap is
worth a trial. A trial lasts a window of rounds, and the overlap stays if it was faster than the window before.
"""

from collections.abc import Collection, Sequence

import numpy as np

from engine.control.costs import RoundCost
from engine.protocols import Overlap

_WINDOW = 24
_SKIPPED = 4
"""Rounds of a window, and the first rounds of an overlap, which are not measured. With a window of 36: 16.1 thousand
tokens/s instead of 16.4 (8B, 64 rows)."""
_HOPEFUL = 0.85
"""An overlap is tried if its predicted tokens per second reach this share of the best overlap's. If all are tried: 3525
tokens/s instead of 3574 (8B, 8 rows)."""
_PAUSE_ROUNDS = 3000
"""Rounds until an overlap is tried again."""


class OverlapChoice:
    """Chooses before each round; `overlap` is the last choice."""

    def __init__(self, overlaps: Collection[Overlap], costs: RoundCost) -> None:
        self.overlap: Overlap = "none"
        self._overlaps = overlaps
        self._costs = costs
        self._best: dict[int, Overlap] = {}
        self._due: dict[tuple[int, Overlap], int] = {}
        self._load = self._num_rounds = self._num_measured = 0
        self._tokens = self._seconds = self._best_rate = 0.0

    def choose(self, num_rows: int, gains: Sequence[float], *, is_fixed: bool) -> int:
        """Choose, and return the number of cohorts.

        Args:
            gains: the mean survival of draft tokens by place.
            is_fixed: whether drafts always have the full length.
        """
        self._num_rounds += 1
        num_rows = max(1, num_rows)
        load = num_rows.bit_length()
        is_measured = self._num_measured >= _SKIPPED + _WINDOW and self._seconds > 0  # a clock may stand still
        if load != self._load or is_measured:
            possible = [overlap for overlap in self._overlaps if num_rows > 1 or overlap != "alternate"]
            rates = {overlap: self.rate(overlap, num_rows, gains, is_fixed=is_fixed) for overlap in possible}
            best = self._best.setdefault(load, max(rates, key=rates.__getitem__, default="none"))
            self.overlap = best if load != self._load else self._measured(rates)
            self._load, self._num_measured, self._tokens, self._seconds = load, 0, 0.0, 0.0
        return 2 if self.overlap == "alternate" else 1

    def observe(self, overlap: Overlap, num_tokens: float, seconds: float) -> None:
        """Record a round without prompts, and how many tokens it was expected to commit."""
        self._num_measured += overlap == self.overlap
        if self._num_measured > _SKIPPED:
            self._tokens += num_tokens
            self._seconds += seconds

    def rate(self, overlap: Overlap, num_rows: int, gains: Sequence[float], *, is_fixed: bool) -> float:
        """Return the most tokens per second that an overlap promises with any draft length."""
        rows = (num_rows + 1) // 2 if overlap == "alternate" else num_rows
        lengths = np.arange(len(gains) + 1)
        passes = self._costs.passes.seconds(rows * (1 + lengths))
        tokens = rows * np.cumsum([1.0, *gains])
        rates = tokens / self._costs.seconds(overlap, rows, lengths, passes)
        return float(rates[-1] if is_fixed else rates.max())

    def _measured(self, rates: dict[Overlap, float]) -> Overlap:
        best, rate = self._best[self._load], self._tokens / self._seconds
        if self.overlap != best:
            if rate > self._best_rate:
                self._best[self._load] = self.overlap
            return self._best[self._load]
        self._best_rate = rate
        due = [overlap for overlap in rates if self._due.get((self._load, overlap), 0) <= self._num_rounds]
        for overlap in sorted(due, key=rates.__getitem__, reverse=True):
            if overlap != best and rates[overlap] > _HOPEFUL * rates[best]:
                self._due[self._load, overlap] = self._num_rounds + _PAUSE_ROUNDS
                return overlap
        return best
