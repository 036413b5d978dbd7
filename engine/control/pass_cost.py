"""PassCost: how long a pass of the target over n tokens takes, prompts and drafts alike, learned from every round.

The logarithm of a pass's time is a scale, which is the machine's speed now, plus the cost of n tokens, which hardly
changes. A surprise is shared between both in proportion to how unsure each is (a Kalman filter with a diagonal
covariance): the cost of a size that was never seen takes nearly all of it, and a machine that becomes slower by half
moves the scale, not the cost of drafts.

Costs are kept at sizes an eighth of an octave apart. Between them they are linear in n, and never fall with n.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log, sqrt

_UNKNOWN = 0.25
"""Variance of the cost of a size never seen: a factor of 1.6 either way."""
_SCALE_DRIFT = 1e-3
_COST_DRIFT = 2e-6
"""Variance that a round adds to the scale and to each cost."""
_NOISE = 0.01
_MIN_NOISE = 1e-4
_NOISE_GAIN = 0.03
_OUTLIER = 3.0
"""Standard deviations at which a surprise is cut off."""
_GROWTH = 0.5
"""Exponent with which costs are assumed to grow above the largest size seen."""
_REBUILT_EVERY = 8


class _Size:
    """A range of sizes: the mean size of its passes, the logarithm of their cost and its variance, and when it was."""

    __slots__ = ("cost", "mean", "round", "variance")

    def __init__(self, mean: float, cost: float, num_rounds: int) -> None:
        self.mean, self.cost, self.variance, self.round = mean, cost, _UNKNOWN, num_rounds


class PassCost:
    """Learns the seconds of passes: `observe` each one, then ask for those of any sizes."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._scale = 0.0
        self._scale_variance = _UNKNOWN
        self._noise = _NOISE
        self._num_rounds = 0
        self._means: list[float] = []
        self._costs: list[float] = []
        self._known: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a pass over so many tokens."""
        if num_tokens < 1 or seconds <= 0:
            return
        self._num_rounds += 1
        self._scale_variance += _SCALE_DRIFT
        key = _key(num_tokens)
        size = self._sizes.get(key)
        if size is None:
            if not self._sizes:
                self._scale = log(seconds)
            size = self._sizes[key] = _Size(num_tokens, log(self.relative(num_tokens)), self._num_rounds)
        size.variance += _COST_DRIFT * (self._num_rounds - size.round)
        is_stale = size.round == self._num_rounds or self._num_rounds % _REBUILT_EVERY == 0
        size.round = self._num_rounds
        total = self._scale_variance + size.variance + self._noise
        most = _OUTLIER * sqrt(total)
        surprise = max(-most, min(most, log(seconds) - self._scale - size.cost))
        size.mean += (num_tokens - size.mean) * size.variance / (size.variance + self._noise)
        size.cost += surprise * size.variance / total
        size.variance -= size.variance**2 / total
        self._scale += surprise * self._scale_variance / total
        self._scale_variance -= self._scale_variance**2 / total
        self._noise = max(_MIN_NOISE, self._noise + _NOISE_GAIN * (surprise**2 - self._noise))
        if is_stale:
            self._rebuild()

    @property
    def scale(self) -> float:
        """The seconds that a relative cost of 1 takes now."""
        return exp(self._scale)

    def relative(self, num_tokens: int) -> float:
        """Return the cost of a pass over so many tokens, over that of the first one seen."""
        if num_tokens not in self._known:
            self._known[num_tokens] = self._between(num_tokens)
        return self._known[num_tokens]

    def seconds(self, num_tokens: int, num_more: int = 0) -> list[float]:
        """Return what passes over `num_tokens` and up to `num_more` tokens more take now, [num_more + 1]."""
        scale, relative = self.scale, self.relative
        return [scale * relative(size) for size in range(num_tokens, num_tokens + num_more + 1)]

    def _between(self, num_tokens: int) -> float:
        means, costs = self._means, self._costs
        if not means:
            return 1.0
        place = bisect_left(means, num_tokens)
        if place == 0:
            return costs[0]
        if place == len(means):
            return float(costs[-1] * (num_tokens / means[-1]) ** _GROWTH)
        low, high = means[place - 1], means[place]
        return costs[place - 1] + (costs[place] - costs[place - 1]) * (num_tokens - low) / (high - low)

    def _rebuild(self) -> None:
        """Let no cost be below that of a smaller size: neighbours that disagree share their mean."""
        sizes = sorted(self._sizes.values(), key=lambda size: size.mean)
        self._means = [size.mean for size in sizes]
        self._costs = rising([exp(size.cost) for size in sizes], [1 / size.variance for size in sizes])
        self._known = {}


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the values nearest to these that never fall, in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] > pool[0]:
            (low, low_weight, low_count), (high, high_weight, count) = pools.pop(), pool
            both = low_weight + high_weight
            pool = (low * low_weight + high * high_weight) / both, both, low_count + count
        pools.append(pool)
    return [value for value, _, count in pools for _ in range(count)]


def _key(num_tokens: int) -> int:
    octave = num_tokens.bit_length() - 1
    return 8 * octave + ((num_tokens - (1 << octave)) * 8 >> octave)
