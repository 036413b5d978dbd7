"""Acceptance: how likely draft tokens are accepted, learned from outcomes, by place.

Nothing else learns acceptance. A place is a token's position in a draft; in `engine.drafting`, it is also the length of
the match before a copied token, or a token's rank among siblings. What a draft model's scores say is calibrated where
they are, in `drafting.model.next_tokens`, because they never leave the draft worker.
"""

from collections.abc import Sequence
from math import exp, log

PRIOR = 0.7
"""Acceptance of a token before anything is known."""


class Acceptance:
    """Log-odds by place, and the information that each rests on.

    A place moves towards an outcome by `error / info`, where `info` is the sum of p (1 - p) over the outcomes that it
    rests on: Newton's step for a logistic model.
    """

    def __init__(self, rates: Sequence[float], *, info: float = 2.0, most_info: float = 60.0) -> None:
        """Begin with rates between 0 and 1 and the information in each; `most_info` is how much counts at most."""
        self.odds = [log(rate / (1 - rate)) for rate in rates]
        self._infos = [info] * len(self.odds)
        self._most_info = most_info

    def rate(self, place: int) -> float:
        """Return how likely a token at a place is accepted."""
        return 1 / (1 + exp(-self.odds[place]))

    def observe(self, place: int, *, accepted: bool) -> None:
        """Learn from one token."""
        rate = self.rate(place)
        self.learn(place, accepted - rate, rate * (1 - rate))

    def learn(self, place: int, error: float, info: float) -> None:
        """Move a place: `error` is the outcome less its prediction, `info` the prediction's variance."""
        self._infos[place] = min(self._infos[place] + info, self._most_info)
        self.odds[place] += error / self._infos[place]
