"""RoundCost: how long a round takes, from the time of its pass, of its drafts, and of the rest, learned from rounds.

A pass of the target takes V(n) whatever the drafter does meanwhile; the wait for drafts of depth d and the rest differ
by that and by the number of rows, in powers of two. One after the other, a round takes D + V. If the drafter runs
ahead, the wait D is short where it foresaw the verdicts. If two cohorts alternate, one of them commits every
`max(V, D)`, both of half the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.control.pass_cost import PassCost
from engine.protocols import Overlap

T = TypeVar("T")

_GAIN = 0.05
_MOST_SURPRISE = 10.0
_FIXED_SHARE = 0.1
"""How much of a surprise at depth 1 is put down to what all depths take."""
_HIT, _HIT_BY_ROW = 0.85, 0.97
"""Before anything is measured: how often a drafter that runs ahead foresees a verdict of one row, and each more row's
share in this. A round waits if one row was not foreseen."""


@dataclass(slots=True)
class _Wait:
    """Seconds of drafting to a depth: `fixed + depth * step`."""

    fixed: float = 0.0
    step: float = 0.0
    num_observed: int = 0

    def seconds(self, depth: int) -> float:
        return self.fixed + depth * self.step

    def observe(self, depth: int, seconds: float) -> None:
        """Correct both parts, the one that weighs more in this depth by more (normalised least mean squares)."""
        self.num_observed += 1
        known = self.seconds(depth)
        if self.num_observed > 1:
            seconds = min(seconds, _MOST_SURPRISE * max(known, 0.01))
        gain = max(1 / self.num_observed, _GAIN) * (seconds - known) / (_FIXED_SHARE + depth * depth)
        self.fixed = max(0.0, self.fixed + _FIXED_SHARE * gain)
        self.step = max(0.0, self.step + depth * gain)


@dataclass(slots=True)
class _Rest:
    """Mean seconds that a round takes beside its formula, of `num_observed` rounds."""

    seconds: float = 0.0
    num_observed: int = 0


class RoundCost:
    """Learns from `observe`; `seconds` predicts. Times are kept relative to the scale of a pass."""

    def __init__(self) -> None:
        self.passes = PassCost()
        self._waits: tuple[dict[int, _Wait], dict[int, _Wait]] = {}, {}
        self._rests: dict[Overlap, dict[int, _Rest]] = {}

    def observe(
        self, overlap: Overlap, num_rows: int, depth: int, *, total_s: float, draft_s: float, verify_s: float
    ) -> None:
        """Record a round that computed no prompt; `depth` is 0 if it made no drafts, or if their time tells nothing."""
        size, scale = _size(num_rows), self.passes.scale
        if depth:
            waits = self._waits[overlap == "ahead"]
            if size not in waits:
                near = _nearest(waits, size) or _Wait()
                waits[size] = _Wait(near.fixed, near.step, min(4, near.num_observed))
            waits[size].observe(depth, draft_s / scale)
        rest = self._rests.setdefault(overlap, {}).setdefault(size, _Rest())
        rest.num_observed += 1
        formula_s = max(draft_s, verify_s) if overlap == "alternate" else draft_s + verify_s
        surprise, most = (total_s - formula_s) / scale - rest.seconds, total_s / scale
        rest.seconds += max(-most, min(most, surprise)) * max(1 / rest.num_observed, _GAIN)

    def wait_s(self, overlap: Overlap, num_rows: int, depth: int) -> float:
        """Return how long a round waits for drafts of a depth."""
        alone, ahead = (_nearest(waits, _size(num_rows)) for waits in self._waits)
        missed = 1 - _HIT * _HIT_BY_ROW ** (num_rows - 1)
        wait, other, factor = (ahead, alone, missed) if overlap == "ahead" else (alone, ahead, 1 / missed)
        if wait is None:
            wait = other and _Wait(factor * other.fixed, factor * other.step)
        return self.passes.scale * wait.seconds(depth) if wait and depth else 0.0

    def seconds(self, overlap: Overlap, num_rows: int, depth: int, passes: Sequence[float]) -> list[float]:
        """Return what rounds take whose passes take so long, given the depth of their drafts."""
        wait_s, size = self.wait_s(overlap, num_rows, depth), _size(num_rows)
        # What a round takes besides is mostly the engine's own work, so unknown ones are like those of other overlaps.
        rest = self._rests.get(overlap, {}).get(size)
        rest = rest or next((near for rests in self._rests.values() if (near := _nearest(rests, size))), _Rest())
        rest_s = rest.seconds * self.passes.scale
        if overlap == "alternate":
            return [rest_s + max(pass_s, wait_s) for pass_s in passes]
        rest_s += wait_s
        return [rest_s + pass_s for pass_s in passes]


def _size(num_rows: int) -> int:
    return (num_rows - 1).bit_length()


def _nearest(known: Mapping[int, T], size: int) -> T | None:
    return known[min(known, key=lambda other: abs(other - size))] if known else None
