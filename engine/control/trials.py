"""Trials: now and then, all requests of a round get drafts of another length, to measure its cost.

Rounds of the length in use say little about the cost of other lengths, and nothing about acceptance if drafts are off.
A length is tried again once the time that its last trial lost is a small share of the time since then.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

_ROUNDS = 2
"""Rounds of a trial. With 3: 0.975 instead of 0.994 of the best fixed length (70B, 32 rows, acceptance 0.8)."""
_LOST_SHARE = 0.002
"""Share of the time that the trials of a length may lose; at most four lengths are tried."""
_PAUSE_ROUNDS = 128
_HOPELESS = 0.3
"""A trial that loses this share of a round ends early. Without: 0.93 to 0.98 of the tokens per second (one row, all
overlaps, in virtual time)."""
_SETTLED_ROUNDS = 4
"""Plans of a load between two trials; a plan is 4 rounds. With 8: 0.975 instead of 0.989 there; never: 0.957."""


@dataclass(slots=True)
class _Load:
    """The trials of a load: when each length may be tried again, and the running trial's length, if any."""

    due: dict[int, float] = field(default_factory=dict)
    length: int | None = None
    num_rounds: int = 0


class Trials:
    """Chooses the rounds that try a length; `clock` is the time that all rounds took, in seconds."""

    def __init__(self) -> None:
        self.clock = 0.0
        self._loads: dict[Hashable, _Load] = {}

    def choose(self, key: Hashable, lengths: Iterable[int], cost: Callable[[int], tuple[float, float]]) -> int | None:
        """Return the length to try in the next round, if any.

        Args:
            key: the load; each load has its own trials.
            lengths: the lengths that may be tried, the most useful first.
            cost: returns the seconds of a round that tries a length, and how many seconds are lost.
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
