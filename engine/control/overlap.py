"""OverlapChoice: what the drafter does while the target verifies, by the most tokens per second.

Run-ahead hides a draft whose verdict it foresees, which is likely for few rows; alternation hides it wholly, and pays
once half the rows take much less time than all. What each promises follows from the learned costs of a round, and says
which one is worth a trial. A window of rounds measures it against the window before, and only the better one stays.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from engine.control.round_cost import RoundCost
from engine.protocols import Overlap

_WINDOW = 24
_SKIPPED = 4
"""Rounds that are measured, after those in which an overlap begins."""
_HOPEFUL = 0.85
"""An overlap is tried if it promises at least this much of what the one in use does: half the rows may cost less."""
_PAUSE_ROUNDS = 3000
"""Rounds until the worse of two is tried again."""


@dataclass(slots=True)
class _Load:
    """The overlap in use for a range of batch sizes, when others may be tried, and what a trial is measured against."""

    overlap: Overlap
    due: dict[Overlap, int] = field(default_factory=dict)
    before: tuple[Overlap, float] | None = None


class OverlapChoice:
    """Chooses before each round, of the overlaps that a drafter is able to.

    Attributes:
        overlap: the last choice.
    """

    def __init__(self, overlaps: Collection[Overlap], costs: RoundCost) -> None:
        self.overlap: Overlap = "none"
        self._overlaps = overlaps
        self._costs = costs
        self._loads: dict[int, _Load] = {}
        self._load: _Load | None = None
        self._num_rounds = self._num_measured = 0
        self._tokens = self._seconds = 0.0

    def choose(self, num_rows: int, survival: Sequence[float], *, is_fixed: bool) -> int:
        """Choose for so many rows, given a row's mean survival by place; return the number of cohorts.

        Args:
            is_fixed: whether drafts always have the full length.
        """
        self._num_rounds += 1
        num_rows = max(1, num_rows)
        possible = [overlap for overlap in self._overlaps if num_rows > 1 or overlap != "alternate"]
        load = self._loads.get(key := (num_rows - 1).bit_length())
        if load is None or (load is self._load and self._num_measured >= _SKIPPED + _WINDOW):
            rates = {overlap: self.rate(overlap, num_rows, survival, is_fixed=is_fixed) for overlap in possible}
            if load is None:
                load = self._loads[key] = _Load(max(rates, key=lambda overlap: rates[overlap], default="none"))
            else:
                self._judge(load, rates)
        if load is not self._load or load.overlap != self.overlap:
            if load is not self._load and load.before is not None:  # a trial of long ago
                load.overlap, load.before = load.before[0], None
            self._begin_window()
        self._load, self.overlap = load, load.overlap
        return 2 if load.overlap == "alternate" else 1

    def observe(self, overlap: Overlap, num_tokens: float, seconds: float) -> None:
        """Record a round that computed no prompt, with its expected tokens."""
        self._num_measured += overlap == self.overlap
        if self._num_measured > _SKIPPED:
            self._tokens += num_tokens
            self._seconds += seconds

    def rate(self, overlap: Overlap, num_rows: int, survival: Sequence[float], *, is_fixed: bool) -> float:
        """Return the most tokens per second that an overlap promises, over the lengths that drafts may have."""
        rows = (num_rows + 1) // 2 if overlap == "alternate" else num_rows
        rates = []
        for length, tokens in enumerate(accumulate(survival, initial=1.0)):
            passes = self._costs.passes.seconds(rows * (1 + length))
            rates.append(rows * tokens / self._costs.seconds(overlap, rows, length, passes)[0])
        return rates[-1] if is_fixed else max(rates)

    def _judge(self, load: _Load, rates: dict[Overlap, float]) -> None:
        """End a trial, or begin one."""
        rate, now = self._tokens / self._seconds, load.overlap
        if load.before is not None:
            other, other_rate = load.before
            load.overlap, worse = (now, other) if rate > other_rate else (other, now)
            load.due[worse], load.before = self._num_rounds + _PAUSE_ROUNDS, None
        else:
            able = [other for other in rates if other != now and load.due.get(other, 0) <= self._num_rounds]
            best = max(able, key=lambda other: rates[other], default=now)
            if best != now and rates[best] > _HOPEFUL * rates.get(now, 0.0):
                load.before, load.overlap = (now, rate), best
        self._begin_window()

    def _begin_window(self) -> None:
        self._num_measured, self._tokens, self._seconds = 0, 0.0, 0.0
