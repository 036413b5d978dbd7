"""Acceptance: how many tokens of a draft the target is expected to accept, learned from verdicts.

Everything that learns acceptance counts with `Rate`. The learners keep rates for different keys: a position of a chain,
a node of a tree, or the length of the match that a copied token followed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

_DRAFTS_REMEMBERED = 200
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_DRAFTS = 4
_FADING = 0.97
"""Factor on the weight of a position's history in each round without a draft token there. While drafts are off,
requests may arrive whose drafts are accepted more often, and one trial should be enough to see it."""


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

    def fade(self) -> None:
        """Weigh the history less, so that new observations count for more."""
        self.weight = min(self.weight, max(_PRIOR_DRAFTS, _FADING * self.weight))


class Acceptance(ABC):
    """Learns from verdicts and predicts the number of accepted tokens, with one rate for each token of a draft."""

    def __init__(self, rates: list[Rate]) -> None:
        self._rates = rates

    @abstractmethod
    def observe(self, num_requested: int, path: Sequence[int]) -> None:
        """Record the `path` of accepted nodes; requested tokens that the drafter did not deliver count as rejected."""

    @abstractmethod
    def gains(self) -> list[float]:
        """Return the expected accepted tokens that each further draft token adds: the probability of each."""

    def fade(self, num_draft_tokens: int) -> None:
        """Let older observations count less at positions that this round's drafts did not reach."""
        for rate in self._rates[num_draft_tokens:]:
            rate.fade()


class ChainAcceptance(Acceptance):
    """For chains: each position's acceptance rate among the drafts that reached it."""

    def __init__(self, max_draft_tokens: int) -> None:
        super().__init__([Rate() for _ in range(max_draft_tokens)])

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


class TreeAcceptance(Acceptance):
    """For trees whose first n nodes are the tree of n nodes: best-first trees, or several chains level by level.

    So a verdict also gives the accepted path of each smaller tree: the nodes of the path that are in it.

    Args:
        num_chains: chains from the tip that make up a tree, a node of each in turn; 1 for best-first trees.
    """

    def __init__(self, max_draft_tokens: int, num_chains: int = 1) -> None:
        self._num_chains = num_chains
        rejected = 1 - _PRIOR_ACCEPTANCE
        super().__init__(
            [
                Rate(_PRIOR_ACCEPTANCE ** (1 + node // num_chains) * rejected ** (node % num_chains))
                for node in range(max_draft_tokens)
            ]
        )

    def observe(self, num_requested: int, path: Sequence[int]) -> None:
        """Record a verdict: which of the requested nodes were accepted."""
        for node in range(num_requested):
            self._rates[node].observe(accepted=node in path)

    def gains(self) -> list[float]:
        """Return the probability that each node is accepted.

        Clamped: no node is likelier than its parent or, in best-first trees, than the previous node.
        """
        gains: list[float] = []
        for node, rate in enumerate(self._rates):
            parent = node - self._num_chains
            gains.append(rate.value if parent < 0 else min(rate.value, gains[parent]))
        return gains
