"""Trials: now and then, all requests of a round get drafts of another length, so that its cost is measured.

What a round of the length in use takes tells little about others, and acceptance may have changed while drafts were
off. A length is tried again once its last trial's lost time is a small share of the time passed.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

_ROUNDS = 2
"""With 3, adaptive lengths made 0.975 instead of 0.994 of the best fixed one (70B, 32 rows, acceptance 0.8)."""
_LOST_SHARE = 0.002
"""Share of the time that the trials of one length (at most four are tried) may lose."""
_PAUSE_ROUNDS = 128
_HOPELESS = 0.3
"""A trial ends early once it loses such a share of a round. Without: 0.93 to 0.98 of the tokens per second
(one row, all overlaps, in virtual time)."""
_SETTLED_ROUNDS = 4
"""Plans of a load between two trials, of 4 rounds each. After 8 rounds: 0.975 instead of 0.989 there; never: 0.957."""


@dataclass(slots=True)
class _Load:
    """The trials of a load: when lengths may be tried again, and the trial that runs, if any, and for how long."""

    due: dict[int, float] = field(default_factory=dict)
    length: int | None = None
    num_rounds: int = 0


class Trials:
    """Chooses the rounds that try a length; `clock` is the time that all rounds took."""

    def __init__(self) -> None:
        self.clock = 0.0
        self._loads: dict[Hashable, _Load] = {}

    def choose(self, key: Hashable, lengths: Iterable[int], cost: Callable[[int], tuple[float, float]]) -> int | None:
        """Return the length to try in the next round, or None for none.

        Args:
            key: the load; each has its own trials.
            lengths: the lengths that may be tried, the most useful first.
            cost: returns the seconds of a round with drafts of a length, and how many of them are lost.
        """
        load = self._loads.setdefault(key, _Load())
        if load.length is not None:
            round_s, lost_s = cost(load.length)
            if load.num_rounds >= _ROUNDS or lost_s > _HOPELESS * round_s:
                lost_s *= load.num_rounds
                load.due[load.length] = self.clock + max(_PAUSE_ROUNDS * round_s, lost_s / _LOST_SHARE)
                load.length, load.num_rounds = None, 0
        if load.length is None and load.num_rounds > _SETTLED_ROUNDS:
            load.length = next((length for length in lengths if load.due.get(length, 0.0) <= self.clock), None)
            load.num_rounds = 0
        load.num_rounds += 1
        return load.length
