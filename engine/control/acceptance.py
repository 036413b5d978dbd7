"""Acceptance: how many tokens of a draft the target is expected to accept, learned from verdicts.

The learners here and in `drafting` keep a `Rate` for each position of a chain, or for each length of the match that a
copied token followed. `survival` learns by request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

_DRAFTS_REMEMBERED = 200
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_DRAFTS = 4


@dataclass(slots=True)
class Rate:
    """The acceptance rate of one kind of draft token, over the last few hundred of them.

    Attributes:
        value: the rate; a guess before the first observation.
        weight: the number of observations in the value.
    """

    value: float = _PRIOR_ACCEPTANCE
    weight: float = _PRIOR_DRAFTS

    def observe(self, *, accepted: bool) -> None:
        """Record one draft token."""
        self.weight = min(self.weight + 1, _DRAFTS_REMEMBERED)
        self.value += (accepted - self.value) / self.weight


class ChainAcceptance:
    """For chains: each position's acceptance rate among the drafts that reached it."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._rates = [Rate() for _ in range(max_draft_tokens)]

    def observe(self, num_requested: int, path: Sequence[int]) -> None:
        """Record a verdict; only positions up to the first rejection count, because later ones were not decided."""
        for position in range(min(len(path) + 1, num_requested)):
            self._rates[position].observe(accepted=position < len(path))

    def gains(self) -> list[float]:
        """Return the probability that each position is accepted."""
        return list(accumulate((rate.value for rate in self._rates), mul))

    def length_probabilities(self, length: int) -> list[float]:
        """Return P(exactly a tokens accepted) for a draft of `length` tokens, [length + 1]."""
        reached = [1.0, *self.gains()[:length]]
        return [*(here - further for here, further in pairwise(reached)), reached[-1]]
