"""Goodput: how many draft tokens the next round gets, by what rounds take and what drafts are worth.

The rule is SmartSpec's (Liu et al., 2406.14066): the length k that promises the most tokens per second,
`(1 + sum over positions of P(accepted so far)) / round time(batch, k)`, k = 0 included. Acceptance alone is the wrong
signal: it stays where it is while a growing batch turns speculation from a gain into a loss.

SmartSpec profiles round times beforehand. Here the length in use is challenged by others, a few rounds each, and a
challenger's time is compared with that of the rounds just before it: what else runs on the machine, or a growing
context, slows both. A length may be tried again when the time its last trial lost is a small share of what has passed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from engine.config import Speculation

Reason = Literal["fixed", "off", "goodput", "trial"]

_LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DRAFTS_REMEMBERED = 200
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_DRAFTS = 4
_MARGIN = 1.01
"""A change of length costs a round or two, so another must promise this much more."""
_WINDOW = 15
_TRIAL_ROUNDS = 8
_FEWEST_ROUNDS = 3
_HOPELESS = 0.7
_LOST_SHARE = 0.004
"""Of the time, that each of the (at most four) challengers may lose by being tried."""
_PAUSE_ROUNDS = 32
_TRIALS_REMEMBERED = 7


@dataclass(slots=True)
class _Trial:
    """A challenger at work. Its first round is not compared with others: an idle draft catches up in it."""

    num_draft_tokens: int
    first_s: float | None = None
    seconds: list[float] = field(default_factory=list)


class _Load:
    """What is known of one range of batch sizes: which length is in use, and what the others cost."""

    def __init__(self, longest: int, best: int) -> None:
        self.lengths = sorted({k for k in _LADDER if k < longest} | {longest})
        self.best = best
        self.costs = {best: 1.0}
        """Round times of the lengths that were tried, relative to one another."""
        self.recent: deque[float] = deque(maxlen=_WINDOW)
        """Seconds of the latest rounds with the length in use."""
        self.trial: _Trial | None = None
        self.last_round = 0
        self._clock = 0.0
        self._due: dict[int, float] = {}
        self._results: dict[int, deque[float]] = {}

    def use(self, best: int) -> None:
        """Put another length to use; the one that was is tried again later."""
        self._rest(self.best, 0.0)
        self.best = best
        self.recent.clear()

    def resume(self, num_rounds: int) -> None:
        """Go on after rounds of other loads; after many of them what is compared may have changed."""
        if num_rounds - self.last_round > _WINDOW:
            self.trial = None
            self.recent.clear()
        self.last_round = num_rounds

    def challenge(self) -> None:
        """Begin a trial if one is due: of none at all, one length shorter, one longer, or the most."""
        if len(self.recent) < _TRIAL_ROUNDS:
            return
        place = self.lengths.index(self.best)
        near = self.lengths[max(0, place - 1) : place + 2]
        able = [k for k in dict.fromkeys([0, *near, self.lengths[-1]]) if k != self.best]
        due = [k for k in able if self._due.get(k, 0.0) <= self._clock]
        self.trial = _Trial(due[0]) if due else None

    def observe(self, seconds: float, *, is_first: bool) -> None:
        """Take a round with the length in use; the first one after another length is not compared."""
        self._clock += seconds
        if not is_first:
            self.recent.append(seconds)

    def observe_trial(self, trial: _Trial, seconds: float, worth: float) -> None:
        """Take a round of a trial; end it when it has run long enough, or promises nothing.

        Args:
            worth: the tokens of the challenger's round over those of a round with the length in use.
        """
        self._clock += seconds
        if trial.first_s is None:
            trial.first_s = seconds
            return
        trial.seconds.append(seconds)
        count, best_s, round_s = len(trial.seconds), median(self.recent), median(trial.seconds)
        is_hopeless = worth * best_s < _HOPELESS * round_s
        if count < (_FEWEST_ROUNDS if is_hopeless else _TRIAL_ROUNDS):
            return
        challenger = trial.num_draft_tokens
        results = self._results.setdefault(challenger, deque(maxlen=_TRIALS_REMEMBERED))
        results.append(self.costs[self.best] * round_s / best_s)
        self.costs[challenger] = median(results)
        self._rest(challenger, trial.first_s + count * round_s - (1 + count) * worth * best_s)
        self.trial = None
        self.recent.clear()

    def _rest(self, num_draft_tokens: int, lost_s: float) -> None:
        """Leave a length alone until what its trial lost is a small share of the time."""
        pause_s = _PAUSE_ROUNDS * median(self.recent) if self.recent else 0.0
        self._due[num_draft_tokens] = self._clock + max(pause_s, lost_s / _LOST_SHARE)


class Goodput:
    """Chooses the draft length of every round: `choose`, run the round, `observe`.

    Batches are told apart by powers of two. `num_draft_tokens` is the length chosen last, `reason` tells why: `goodput`
    promises most, `trial` is being tried, `fixed` and `off` were configured.
    """

    def __init__(self, max_draft_tokens: int, speculation: Speculation = "adaptive") -> None:
        self.num_draft_tokens = 0 if speculation == "off" else max_draft_tokens
        self._is_adaptive = speculation == "adaptive" and max_draft_tokens > 0
        self.reason: Reason = "goodput" if self._is_adaptive else "fixed" if self.num_draft_tokens else "off"
        self._acceptance = [_PRIOR_ACCEPTANCE] * max_draft_tokens
        self._num_reached = [_PRIOR_DRAFTS] * max_draft_tokens
        self._loads: dict[tuple[int, int], _Load] = {}
        self._load: _Load | None = None
        self._num_rounds = 0
        self._is_first = False

    def choose(self, limits: Sequence[int], *, is_measured: bool) -> int:
        """Return the draft length of the next round.

        Args:
            limits: the longest draft that each decoding request may get.
            is_measured: whether `observe` will follow; a round that computes prompts too says nothing of lengths.
        """
        if not self._is_adaptive or not limits:
            return self.num_draft_tokens
        load = self._load = self._find(len(limits), max(limits))
        self._num_rounds += 1
        load.resume(self._num_rounds)
        if load.trial is None:
            promises = {k: self.expected_tokens(k, limits) / cost for k, cost in load.costs.items()}
            best = max(promises, key=lambda k: promises[k])
            if promises[best] > _MARGIN * promises[load.best]:
                load.use(best)
        if load.trial is None and is_measured:
            load.challenge()
        chosen = load.best
        self.reason = "goodput"
        if load.trial is not None and is_measured:
            chosen, self.reason = load.trial.num_draft_tokens, "trial"
        self._is_first = chosen != self.num_draft_tokens
        self.num_draft_tokens = chosen
        return chosen

    def observe(self, limits: Sequence[int], seconds: float) -> None:
        """Take what the round took that was chosen last, from the end of the one before it to its own."""
        load = self._load
        if load is None:
            return
        if load.trial is None:
            load.observe(seconds, is_first=self._is_first)
            return
        expected = [self.expected_tokens(k, limits) for k in (load.trial.num_draft_tokens, load.best)]
        load.observe_trial(load.trial, seconds, expected[0] / expected[1])

    def observe_draft(self, num_wanted: int, num_accepted: int) -> None:
        """Take a verdict. A draft token that was wanted and did not come counts as rejected.

        Positions up to the first rejection say something of acceptance, those behind it nothing.
        """
        for position in range(min(num_accepted + 1, num_wanted)):
            count = self._num_reached[position] = min(self._num_reached[position] + 1, _DRAFTS_REMEMBERED)
            self._acceptance[position] += ((position < num_accepted) - self._acceptance[position]) / count

    def expected_tokens(self, num_draft_tokens: int, limits: Sequence[int]) -> float:
        """Return the tokens that a round is expected to commit, of all requests together."""
        totals = [1.0]
        reached = 1.0
        for rate in self._acceptance[:num_draft_tokens]:
            reached *= rate
            totals.append(totals[-1] + reached)
        return sum(totals[min(limit, num_draft_tokens)] for limit in limits)

    def _find(self, batch_size: int, longest: int) -> _Load:
        """Return what is known of a batch size; a new one begins with the length in use at the nearest."""
        key = (batch_size - 1).bit_length(), longest
        if key not in self._loads:
            alike = [known for known in self._loads if known[1] == longest]
            near = min(alike, key=lambda known: abs(known[0] - key[0]), default=None)
            self._loads[key] = _Load(longest, longest if near is None else self._loads[near].best)
        return self._loads[key]
