"""Goodput: chooses the draft length of each round from measured round times and acceptance rates.

The rule is SmartSpec's (Liu et al., 2406.14066): choose the length k, 0 included, with the most expected tokens per
second, `(1 + sum over positions of P(all accepted up to there)) / round time(batch, k)`. Acceptance alone is not
enough: it stays the same while a growing batch turns speculation from a gain into a loss.

SmartSpec profiles round times beforehand. Here trials measure them while requests are served: another length runs for
a few rounds, and its round time is compared with the rounds just before, because other load on the machine or longer
contexts slow both. A length is tried again once its last trial's lost time is a small share of the time passed.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median
from typing import Literal

from engine.config import Speculation
from engine.control.acceptance import Acceptance

Reason = Literal["fixed", "off", "goodput", "trial", "request"]

_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MARGIN = 1.01
"""Another length must promise this much more, because a change of length costs a round or two."""
_WINDOW = 15
_TRIAL_ROUNDS = 8
_MIN_TRIAL_ROUNDS = 3
_HOPELESS = 0.7
_LOST_SHARE = 0.004
"""Share of the time that the trials of one length (at most four are tried) may lose."""
_PAUSE_ROUNDS = 32
_TRIALS_REMEMBERED = 7


@dataclass(slots=True)
class _Trial:
    """A few rounds with another length. The first one does not count: an idle drafter catches up in it."""

    num_draft_tokens: int
    seconds: list[float] = field(default_factory=list)


class _Load:
    """The state of one range of batch sizes: the length in use, and measured round times of others."""

    def __init__(self, longest: int, best: int) -> None:
        self.lengths = sorted({k for k in _LENGTHS if k < longest} | {longest})
        self.best = best
        self.costs = {best: 1.0}
        """Relative round time of each length tried so far."""
        self.recent: deque[float] = deque(maxlen=_WINDOW)
        """Seconds of the last rounds with the length in use."""
        self.trial: _Trial | None = None
        self.last_round = 0
        self._clock = 0.0
        self._due: dict[int, float] = {}
        self._results: dict[int, deque[float]] = {}

    def use(self, best: int) -> None:
        """Switch to another length; the old one is tried again later."""
        self._postpone(self.best, 0.0)
        self.best = best
        self.recent.clear()

    def resume(self, num_rounds: int) -> None:
        """Drop stale timings when this batch size returns."""
        if num_rounds - self.last_round > _WINDOW:
            self.trial = None
            self.recent.clear()
        self.last_round = num_rounds

    def challenge(self) -> None:
        """Start a trial if one is due: of no draft, the next shorter, the next longer, or the longest draft."""
        if len(self.recent) < _TRIAL_ROUNDS:
            return
        index = self.lengths.index(self.best)
        neighbours = self.lengths[max(0, index - 1) : index + 2]
        others = [k for k in dict.fromkeys([0, *neighbours, self.lengths[-1]]) if k != self.best]
        due = [k for k in others if self._due.get(k, 0.0) <= self._clock]
        self.trial = _Trial(due[0]) if due else None

    def observe(self, seconds: float, *, is_first: bool) -> None:
        """Record a round with the length in use; the first one after a change of length does not count."""
        self._clock += seconds
        if not is_first:
            self.recent.append(seconds)

    def observe_trial(self, trial: _Trial, seconds: float, token_ratio: float) -> None:
        """Record a round of a trial; end the trial after enough rounds, or early if it is clearly slower.

        Args:
            token_ratio: expected tokens of a round with the tried length, over those with the length in use.
        """
        self._clock += seconds
        trial.seconds.append(seconds)
        first_s, *counted = trial.seconds
        if not counted:
            return
        count, best_s, round_s = len(counted), median(self.recent), median(counted)
        is_hopeless = token_ratio * best_s < _HOPELESS * round_s
        if count < (_MIN_TRIAL_ROUNDS if is_hopeless else _TRIAL_ROUNDS):
            return
        tried = trial.num_draft_tokens
        results = self._results.setdefault(tried, deque(maxlen=_TRIALS_REMEMBERED))
        results.append(self.costs[self.best] * round_s / best_s)
        self.costs[tried] = median(results)
        self._postpone(tried, first_s + count * round_s - (1 + count) * token_ratio * best_s)
        self.trial = None
        self.recent.clear()

    def _postpone(self, num_draft_tokens: int, lost_s: float) -> None:
        """Set when a length may be tried again: once `lost_s` is a small share of the time passed."""
        pause_s = _PAUSE_ROUNDS * median(self.recent) if self.recent else 0.0
        self._due[num_draft_tokens] = self._clock + max(pause_s, lost_s / _LOST_SHARE)


class Goodput:
    """Chooses the draft length of every round: `choose`, run the round, `observe`.

    Batch sizes are grouped by powers of two. `num_draft_tokens` is the last chosen length; `acceptance` learns from
    the verdicts.
    """

    def __init__(self, max_draft_tokens: int, acceptance: Acceptance, speculation: Speculation = "adaptive") -> None:
        self.num_draft_tokens = max_draft_tokens
        self._is_adaptive = speculation == "adaptive" and max_draft_tokens > 0
        self._reason: Reason = "goodput" if self._is_adaptive else "fixed" if max_draft_tokens else "off"
        self.acceptance = acceptance
        self._loads: dict[tuple[int, int], _Load] = {}
        self._load: _Load | None = None
        self._num_rounds = 0
        self._is_first = False

    def choose(self, limits: Sequence[int], *, is_measured: bool) -> tuple[int, Reason]:
        """Return the draft length of the next round, and why: a trial, the most tokens per second, or a setting.

        Args:
            limits: the longest draft that each decoding request may get.
            is_measured: whether `observe` will follow; rounds that also compute prompts are not measured.
        """
        if not self._is_adaptive or not limits:
            return self.num_draft_tokens, self._reason
        load = self._load = self._load_of(len(limits), max(limits))
        self._num_rounds += 1
        load.resume(self._num_rounds)
        if load.trial is None:
            promises = {k: self.expected_tokens(k, limits) / cost for k, cost in load.costs.items()}
            best = max(promises, key=lambda k: promises[k])
            if promises[best] > _MARGIN * promises[load.best]:
                load.use(best)
        if load.trial is None and is_measured:
            load.challenge()
        chosen, self._reason = load.best, "goodput"
        if load.trial is not None and is_measured:
            chosen, self._reason = load.trial.num_draft_tokens, "trial"
        self._is_first = chosen != self.num_draft_tokens
        self.num_draft_tokens = chosen
        self.acceptance.fade(chosen)
        return chosen, self._reason

    def observe(self, limits: Sequence[int], seconds: float) -> None:
        """Record the time of the round chosen last, from the end of the round before it to its end."""
        load = self._load
        if load is not None and load.trial is not None:
            expected = [self.expected_tokens(k, limits) for k in (load.trial.num_draft_tokens, load.best)]
            load.observe_trial(load.trial, seconds, expected[0] / expected[1])
        elif load is not None:
            load.observe(seconds, is_first=self._is_first)

    @property
    def gains(self) -> list[float]:
        """The expected accepted tokens that each token of the last chosen length adds."""
        return self.acceptance.gains()[: self.num_draft_tokens]

    def expected_tokens(self, num_draft_tokens: int, limits: Sequence[int]) -> float:
        """Return how many tokens a round is expected to commit over all requests."""
        totals = list(itertools.accumulate(self.acceptance.gains()[:num_draft_tokens], initial=1.0))
        return sum(totals[min(limit, num_draft_tokens)] for limit in limits)

    def _load_of(self, batch_size: int, longest: int) -> _Load:
        """Return the state of a batch size; a new one starts with the length in use at the nearest batch size."""
        key = (batch_size - 1).bit_length(), longest
        if key not in self._loads:
            known = [(abs(size - key[0]), load.best) for (size, most), load in self._loads.items() if most == longest]
            _, best = min(known, key=itemgetter(0), default=(0, longest))
            self._loads[key] = _Load(longest, best)
        return self._loads[key]
