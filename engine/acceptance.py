"""Acceptance: how many tokens of a draft of each length the target is expected to accept, learned from verdicts."""

from collections.abc import Sequence
from typing import Protocol

_DRAFTS_REMEMBERED = 200
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_DRAFTS = 4
_FADING = 0.97
"""What is left, after a round without a draft token at a position, of the weight of the drafts remembered there. While
drafts are off, requests come whose drafts would be accepted more often, and one trial should be enough to see it."""


class Acceptance(Protocol):
    """Learns from verdicts and predicts the number of accepted tokens."""

    def observe(self, num_requested: int, path: Sequence[int]) -> None:
        """Record a verdict; requested draft tokens that the drafter did not deliver count as rejected.

        Args:
            path: the accepted nodes of the draft.
        """
        ...

    def fade(self, num_draft_tokens: int) -> None:
        """Let positions beyond a round's drafts be learned anew, faster with every such round."""
        ...

    def gains(self) -> list[float]:
        """Return by how many accepted tokens each draft token lengthens the expected path, the first one's first."""
        ...


class ChainAcceptance:
    """For chains: each position's acceptance rate among the drafts that reached it."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._rates = [_PRIOR_ACCEPTANCE] * max_draft_tokens
        self._num_reached = [float(_PRIOR_DRAFTS)] * max_draft_tokens

    def observe(self, num_requested: int, path: Sequence[int]) -> None:
        """Record a verdict; only positions up to the first rejection count, because later ones were not decided."""
        for position in range(min(len(path) + 1, num_requested)):
            count = self._num_reached[position] = min(self._num_reached[position] + 1, _DRAFTS_REMEMBERED)
            self._rates[position] += ((position < len(path)) - self._rates[position]) / count

    def fade(self, num_draft_tokens: int) -> None:
        """Weigh less what is remembered of positions beyond a round's drafts."""
        _fade(self._num_reached, num_draft_tokens)

    def gains(self) -> list[float]:
        """Return the probability that each position is accepted."""
        reached, gains = 1.0, []
        for rate in self._rates:
            reached *= rate
            gains.append(reached)
        return gains


class TreeAcceptance:
    """For trees of which the first n nodes are the tree of n nodes: the best first, or several chains level by level.

    A verdict therefore tells what each smaller tree would have had accepted: the part of the path in its nodes.
    """

    def __init__(self, max_draft_tokens: int, num_chains: int = 1) -> None:
        """Start without observations.

        Args:
            num_chains: chains from the tip that make up a tree, a node of each in turn; 1 for nodes that come the best
                first.
        """
        self._num_chains = num_chains
        rejected = 1 - _PRIOR_ACCEPTANCE
        self._rates = [
            _PRIOR_ACCEPTANCE ** (1 + node // num_chains) * rejected ** (node % num_chains)
            for node in range(max_draft_tokens)
        ]
        self._num_drafts = [float(_PRIOR_DRAFTS)] * max_draft_tokens

    def observe(self, num_requested: int, path: Sequence[int]) -> None:
        """Record a verdict: which of the requested nodes were accepted."""
        accepted = set(path)
        for node in range(num_requested):
            count = self._num_drafts[node] = min(self._num_drafts[node] + 1, _DRAFTS_REMEMBERED)
            self._rates[node] += ((node in accepted) - self._rates[node]) / count

    def fade(self, num_draft_tokens: int) -> None:
        """Weigh less what is remembered of nodes beyond a round's drafts."""
        _fade(self._num_drafts, num_draft_tokens)

    def gains(self) -> list[float]:
        """Return the probability that each node is accepted.

        None is likelier than its parent in its chain, nor, where nodes come the best first, than the one before it.
        """
        gains: list[float] = []
        for node, rate in enumerate(self._rates):
            gains.append(min(rate, gains[node - self._num_chains]) if node >= self._num_chains else rate)
        return gains


def _fade(weights: list[float], first: int) -> None:
    for position in range(first, len(weights)):
        if weights[position] > _PRIOR_DRAFTS:
            weights[position] = max(_PRIOR_DRAFTS, _FADING * weights[position])
