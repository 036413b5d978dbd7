"""Acceptance: how likely draft tokens are accepted, learned from outcomes, by place.

A place is a token's position in a draft, or the draft model that proposed it. In `engine.drafting`, it can also be the
length of the match before a copied token, or a token's rank among siblings.
"""

from collections.abc import Sequence
from math import exp, log, sqrt

PRIOR = 0.7
"""Acceptance of a token before anything is known."""


class Acceptance:
    """The log-odds of acceptance by place.

    An outcome moves a place's log-odds by `error / info`, where `info` is the sum of p (1 - p) over all its outcomes:
    Newton's step for a logistic model.
    """

    def __init__(self, rates: Sequence[float], *, info: float = 2.0, most_info: float = 60.0) -> None:
        """Begin with a rate between 0 and 1 for each place; `most_info` caps the information of a place."""
        self.odds = [log(rate / (1 - rate)) for rate in rates]
        self._infos = [info] * len(self.odds)
        self._most_info = most_info

    def rate(self, place: int) -> float:
        """Return how likely a token at a place is accepted."""
        return 1 / (1 + exp(-self.odds[place]))

    def bound(self, place: int, width: float) -> float:
        """Return the log-odds of a place plus `width` standard deviations: the less is known, the higher."""
        return self.odds[place] + width / sqrt(self._infos[place])

    def fade(self, share: float) -> None:
        """Keep a share of the information of all places."""
        self._infos = [share * info for info in self._infos]

    def observe(self, place: int, *, accepted: bool) -> None:
        """Learn from a token."""
        rate = self.rate(place)
        self.learn(place, accepted - rate, rate * (1 - rate))

    def learn(self, place: int, error: float, info: float) -> None:
        """Move a place; `error` is the outcome minus its prediction, `info` the prediction's variance."""
        self._infos[place] = min(self._infos[place] + info, self._most_info)
        self.odds[place] += error / self._infos[place]
