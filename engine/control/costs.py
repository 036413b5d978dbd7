"""Costs: how long passes of the target and rounds take, learned from rounds.

A pass over n tokens (prompt and draft tokens alike) takes `scale * cost(n)`: the scale follows the machine's present
speed, the costs change slowly. A round takes its pass, the wait for drafts, and the engine's own work. Run-ahead makes
the wait shorter. In alternation, the pass and the wait run in parallel.
"""

from dataclasses import dataclass, replace
from math import exp, log, log2
from typing import Any

import numpy as np

from engine.control.plan import RoundSeconds
from engine.protocols import Overlap

_SIZES = 4
"""Sizes per octave at which costs are kept; costs are linear between them. 8: 16.1 thousand tokens/s instead of 16.3
(8B, 64 rows, all overlaps); 2: 0.979 instead of 0.988 of the best fixed length (70B, 32 rows)."""
_GAIN = 0.05
"""Weight of a round in the scale, the wait and the engine's own work. 0.1: 16.3 thousand tokens/s instead of 16.5 (8B,
64 rows, all overlaps)."""
_COST_GAIN = 0.02
"""Weight of a pass in the cost of its size."""
_MOST_SURPRISE = 0.7
"""A pass counts as at most twice, and at least half, of its predicted time."""
_GROWTH = 0.5
"""Costs above the largest size seen grow with this exponent. With 1, a load of 1 to 128 rows that changes every 40
rounds made 0.98 of the tokens per second."""
_FIXED_SHARE = 0.1
"""Weight with which a surprise corrects the wait's fixed part; the weight of its step is the depth."""
_HIT = 0.97
"""How often run-ahead foresees a row's verdict, until it is measured. It foresaw all of 1, 8 and 64 rows in 0.93, 0.78
and 0.20 of the rounds of `python -m tests.bench paced`."""


@dataclass(slots=True)
class _Size:
    """Passes of similar size; `cost` is a logarithm."""

    mean: float
    cost: float = 0.0
    count: int = 0


class PassCost:
    """Learns how long passes take: `observe` passes, then ask for the `seconds` of any sizes."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._sizes: dict[int, _Size] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a pass over `num_tokens` tokens."""
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
        """Return the seconds of passes by size, a number or an array; they never fall with size."""
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
    """What rounds of an overlap and a number of rows take beside their passes, divided by the scale of passes.

    Attributes:
        rest: the engine's own work, mostly.
        fixed, step: the wait for drafts is `fixed + depth * step`.
    """

    rest: float = 0.0
    fixed: float = 0.0
    step: float = 0.0
    num_rests: int = 0
    num_waits: int = 0

    def wait(self, depth: Any) -> Any:
        return (depth > 0) * self.fixed + depth * self.step

    def observe(self, depth: int, wait: float, rest: float, most: float) -> None:
        # Normalised least mean squares.
        self.num_rests += 1
        self.rest += max(1 / self.num_rests, _GAIN) * max(-most, min(most, rest - self.rest))
        if depth:
            self.num_waits += 1
            surprise = max(1 / self.num_waits, _GAIN) * max(-most, min(most, wait - self.wait(depth)))
            share = surprise / (_FIXED_SHARE + depth * depth)
            self.fixed = max(0.0, self.fixed + _FIXED_SHARE * share)
            self.step = max(0.0, self.step + depth * share)


class RoundCost:
    """Learns how long rounds take: `observe` rounds, then ask for the `seconds` of any."""

    def __init__(self) -> None:
        self.passes = PassCost()
        self._known: dict[Overlap, dict[int, _Beside]] = {}

    def observe(self, overlap: Overlap, num_rows: int, depth: int, seconds: RoundSeconds) -> None:
        """Record a round without prompts; `depth` is 0 if it made no drafts, or if their time is not representative."""
        near, scale = self._beside(overlap, num_rows), self.passes.scale
        known = self._known.setdefault(overlap, {})
        beside = known.setdefault(num_rows.bit_length(), replace(near, num_rests=0, num_waits=min(4, near.num_waits)))
        draft_s, verify_s, total_s = seconds.draft_s, seconds.verify_s, seconds.total_s
        formula_s = max(draft_s, verify_s) if overlap == "alternate" else draft_s + verify_s
        beside.observe(depth, draft_s / scale, (total_s - formula_s) / scale, total_s / scale)

    def seconds(self, overlap: Overlap, num_rows: int, depths: Any, passes: Any) -> Any:
        """Return the seconds of rounds, given their drafts' depths and their passes' seconds: numbers or arrays."""
        beside = self._beside(overlap, num_rows)
        wait_s, rest_s = self.passes.scale * beside.wait(depths), self.passes.scale * beside.rest
        return rest_s + (np.maximum(passes, wait_s) if overlap == "alternate" else passes + wait_s)

    def _beside(self, overlap: Overlap, num_rows: int) -> _Beside:
        """Return the nearest measured number of rows; an overlap that was not measured takes another's."""
        known = self._known.get(overlap) or next(iter(self._known.values()), {0: _Beside()})
        nearest = known[min(known, key=lambda size: abs(size - num_rows.bit_length()))]
        if overlap != "ahead" or overlap in self._known:
            return nearest
        missed = 1 - _HIT**num_rows
        return replace(nearest, fixed=missed * nearest.fixed, step=missed * nearest.step)
