"""Costs: how long passes of the target and rounds take, learned from rounds.

A pass over n tokens, prompts and drafts alike, takes a scale, which is the machine's speed now, times the cost of n
tokens, which hardly changes. A round adds the wait for drafts of depth d, and the rest. If the drafter runs ahead, the
wait is short where it foresaw the verdicts. If two cohorts alternate, one of them commits every `max(pass, wait)`.
"""

from dataclasses import dataclass, replace
from math import exp, log, log2
from typing import Any

import numpy as np

from engine.control.plan import RoundSeconds
from engine.protocols import Overlap

_SIZES = 4
"""Costs are kept at so many sizes an octave, and are linear between them. 8: 16.1 thousand tokens/s instead of 16.3
(8B, 64 rows, all overlaps); 2: 0.979 instead of 0.988 of the best fixed length (70B, 32 rows)."""
_GAIN = 0.05
"""Weight of a round in the scale and in what a round adds to its pass. 0.1: 16.3 thousand tokens/s there, instead of
16.5."""
_COST_GAIN = 0.02
"""Weight of a pass in the cost of its size."""
_MOST_SURPRISE = 0.7
"""A known pass that took more than twice the time, or less than half of it, counts as that."""
_GROWTH = 0.5
"""Exponent with which costs are assumed to grow above the largest size seen. With 1, a load of 1 to 128 rows that
changes every 40 rounds made 0.98 of the tokens per second."""
_FIXED_SHARE = 0.1
"""How much of a surprise at depth 1 is put down to what all depths take."""
_HIT = 0.97
"""Before anything is measured: how often a drafter that runs ahead foresees a row's verdict. It foresaw all of 1, 8 and
64 rows in 0.93, 0.78 and 0.20 of the rounds of `python -m tests.bench paced`."""


@dataclass(slots=True)
class _Size:
    """Passes of about one size: their mean size, the logarithm of their cost, and how many they were."""

    mean: float
    cost: float = 0.0
    count: int = 0


class PassCost:
    """Learns the seconds of passes: `observe` each one, then ask for any sizes."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._sizes: dict[int, _Size] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a pass over so many tokens."""
        if seconds <= 0:  # the clock stood still
            return
        if not self._sizes:
            self.scale = seconds
        size = self._sizes.setdefault(round(_SIZES * log2(num_tokens)), _Size(num_tokens))
        size.count += 1
        surprise = log(seconds / self.scale) - size.cost
        if size.count > 1:  # a size that was never seen takes the surprise, not the machine
            surprise = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, surprise))
            self.scale *= exp(_GAIN * surprise)
        size.mean += (num_tokens - size.mean) / size.count
        size.cost += max(1 / size.count, _COST_GAIN) * surprise

    def seconds(self, sizes: Any) -> Any:
        """Return what passes over so many tokens, a number or an array, take now; a larger one never takes less."""
        if not self._sizes:
            return np.ones(np.shape(sizes))
        known = sorted(self._sizes.values(), key=lambda size: size.mean)
        means = np.array([size.mean for size in known])
        costs = np.exp([size.cost for size in known])
        costs = (np.maximum.accumulate(costs) + np.minimum.accumulate(costs[::-1])[::-1]) / 2
        beyond = np.maximum(1.0, sizes / means[-1])
        return self.scale * np.interp(sizes, means, costs) * beyond**_GROWTH


@dataclass(slots=True)
class _Beside:
    """What a round of some overlap and number of rows takes beside its pass, over the scale of a pass.

    Attributes:
        rest: mostly the engine's own work.
        fixed, step: the wait for drafts, `fixed + depth * step`.
        num_rests, num_waits: the rounds that taught these.
    """

    rest: float = 0.0
    fixed: float = 0.0
    step: float = 0.0
    num_rests: int = 0
    num_waits: int = 0

    def wait(self, depth: Any) -> Any:
        return (depth > 0) * self.fixed + depth * self.step

    def observe(self, depth: int, wait: float, rest: float, most: float) -> None:
        """Correct the rest, and both parts of the wait by their weights (normalised least mean squares)."""
        self.num_rests += 1
        self.rest += max(1 / self.num_rests, _GAIN) * max(-most, min(most, rest - self.rest))
        if depth:
            self.num_waits += 1
            surprise = max(1 / self.num_waits, _GAIN) * max(-most, min(most, wait - self.wait(depth)))
            share = surprise / (_FIXED_SHARE + depth * depth)
            self.fixed = max(0.0, self.fixed + _FIXED_SHARE * share)
            self.step = max(0.0, self.step + depth * share)


class RoundCost:
    """Learns from `observe`; `seconds` predicts."""

    def __init__(self) -> None:
        self.passes = PassCost()
        self._known: dict[Overlap, dict[int, _Beside]] = {}

    def observe(self, overlap: Overlap, num_rows: int, depth: int, seconds: RoundSeconds) -> None:
        """Record a round that computed no prompt; `depth` is 0 if it made no drafts, or if their time tells nothing."""
        near, scale = self._beside(overlap, num_rows), self.passes.scale
        known = self._known.setdefault(overlap, {})
        beside = known.setdefault(num_rows.bit_length(), replace(near, num_rests=0, num_waits=min(4, near.num_waits)))
        draft_s, verify_s, total_s = seconds.draft_s, seconds.verify_s, seconds.total_s
        formula_s = max(draft_s, verify_s) if overlap == "alternate" else draft_s + verify_s
        beside.observe(depth, draft_s / scale, (total_s - formula_s) / scale, total_s / scale)

    def seconds(self, overlap: Overlap, num_rows: int, depths: Any, passes: Any) -> Any:
        """Return what rounds take, given the depths of their drafts and what their passes take: numbers or arrays."""
        beside = self._beside(overlap, num_rows)
        wait_s, rest_s = self.passes.scale * beside.wait(depths), self.passes.scale * beside.rest
        return rest_s + (np.maximum(passes, wait_s) if overlap == "alternate" else passes + wait_s)

    def _beside(self, overlap: Overlap, num_rows: int) -> _Beside:
        """Return what is known of rounds with about so many rows; before they are measured, of other overlaps."""
        known = self._known.get(overlap) or next(iter(self._known.values()), {0: _Beside()})
        nearest = known[min(known, key=lambda size: abs(size - num_rows.bit_length()))]
        if overlap != "ahead" or overlap in self._known:
            return nearest
        missed = 1 - _HIT**num_rows
        return replace(nearest, fixed=missed * nearest.fixed, step=missed * nearest.step)
