"""Trials: now and then, all requests of a round get drafts of another length, so that its cost is measured.

What a round of the length in use takes tells little about others, and acceptance may have changed while drafts were
off. A length is tried again once its last trial's lost time is a small share of the time passed.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from engine.control.budget import Budget

_ROUNDS = 3
_LOST_SHARE = 0.002
"""Share of the time that the trials of one length (at most four are tried) may lose."""
_PAUSE_ROUNDS = 128
_SETTLED_ROUNDS = 8
"""Rounds of a load before a trial."""
_GAP_ROUNDS = 15
"""A trial does not go on after so many rounds of other loads."""
_HOPEFUL = 1.02
"""A longer draft is tried if it would pay by this factor if it took no more time."""
_HOPELESS = 0.7
"""A trial ends early once it makes so few tokens per second, over the best."""

Promise = Callable[[int], tuple[float, float]]
"""Returns the expected tokens and seconds of a round with drafts of a length."""


@dataclass(slots=True)
class _Load:
    """The trials of one load: when lengths may be tried again, and the trial that runs, if any."""

    due: dict[int, float] = field(default_factory=dict)
    last_round: int = 0
    num_settled: int = 0
    length: int | None = None
    num_rounds: int = 0


class Trials:
    """Chooses the rounds that try a length; `clock` is the time that all rounds took, `num_rounds` how many began."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.num_rounds = 0
        self._loads: dict[Hashable, _Load] = {}

    def choose(
        self, key: Hashable, lengths: Sequence[int], length: int, budget: Budget, promise: Promise
    ) -> int | None:
        """Return the length to try in the next round, or None for none.

        Args:
            key: the load; each has its own trials.
            lengths: all lengths, from 0 to the longest.
            length: the longest draft in use.
            budget: the best one of all requests.
        """
        load = self._loads.setdefault(key, _Load())
        passed, load.last_round = self.num_rounds - load.last_round, self.num_rounds
        if passed > _GAP_ROUNDS:
            load.length, load.num_settled, passed = None, 0, 0
        if load.length is not None:
            tokens, seconds = promise(load.length)
            if load.num_rounds >= _ROUNDS or tokens < _HOPELESS * budget.rate * seconds:
                lost_s = load.num_rounds * (seconds - tokens / budget.rate)
                pause_s = max(_PAUSE_ROUNDS * seconds, lost_s / _LOST_SHARE)
                load.due[load.length], load.length, load.num_settled = self.clock + pause_s, None, 0
        if load.length is None:
            load.num_settled += passed
            if load.num_settled > _SETTLED_ROUNDS:
                load.length, load.num_rounds = self._due(load, lengths, length, budget, promise), 0
        load.num_rounds += 1
        return load.length

    def _due(self, load: _Load, lengths: Sequence[int], length: int, budget: Budget, promise: Promise) -> int | None:
        """Return a length to try: none, half of that in use, the next longer, or the longest."""
        longer = next((k for k in lengths if k > length), length)
        for other in dict.fromkeys((0, length // 2, longer, lengths[-1])):
            if other == length or load.due.get(other, 0.0) > self.clock:
                continue
            if other < length or promise(other)[0] > _HOPEFUL * budget.num_tokens:
                return other
        return None
