"""Budget: which draft tokens of a round are worth their place in it.

Tokens are taken by their survival, the likeliest first, as long as more of them raise goodput: expected tokens over the
round's time. This is SmartSpec's rule (Liu et al., 2406.14066) for single tokens of each request.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import neg, truediv
from typing import NamedTuple

from engine.protocols import Draft

_LEAST = 0.04
"""A token that is less likely to survive is never taken, however cheap its place in a pass seems."""


class Budget(NamedTuple):
    """The tokens per second of a round, its tokens, its draft tokens, and the least survival of these."""

    rate: float
    num_tokens: float
    num_slots: int
    least: float


def best_budget(num_tokens: float, survivals: list[float], seconds: Sequence[float]) -> Budget:
    """Return the budget with the most tokens per second; survivals are sorted and cut in place.

    Args:
        num_tokens: what the round commits without draft tokens.
        seconds: [n + 1] what it takes with 0 to n of them, if there are n survivals.
    """
    survivals.sort(reverse=True)
    del survivals[bisect_left(survivals, -_LEAST, key=neg) :]
    tokens = list(accumulate(survivals, initial=num_tokens))
    rates = list(map(truediv, tokens, seconds))
    rate = max(rates)
    count = rates.index(rate)
    return Budget(rate, tokens[count], count, survivals[count - 1] if count else 2.0)


def lengths_within(budget: Budget, survivals: Sequence[Sequence[float]]) -> list[int]:
    """Return how many tokens each draft has of a budget, given their survivals, which never rise within a draft."""
    lengths = [bisect_left(row, -budget.least, key=neg) for row in survivals]
    num_left = budget.num_slots - sum(lengths)
    for i, row in enumerate(survivals):
        while num_left > 0 and lengths[i] < len(row) and row[lengths[i]] == budget.least:
            lengths[i] += 1
            num_left -= 1
    return lengths


def cut_drafts(budget: Budget, drafts: Sequence[Draft], survivals: Sequence[Sequence[float]]) -> list[Draft]:
    """Return drafts with only the nodes of a budget, given all nodes' survivals, which are at most their parents'."""
    num_left = budget.num_slots - sum(gain > budget.least for row in survivals for gain in row)
    cut = []
    for draft, row in zip(drafts, survivals, strict=True):
        kept = []
        for node, gain in enumerate(row):
            if gain > budget.least or (gain == budget.least and num_left > 0):
                num_left -= gain == budget.least
                kept.append(node)
        cut.append(draft if len(kept) == len(row) else _part(draft, kept))
    return cut


def _part(draft: Draft, nodes: list[int]) -> Draft:
    """Return the draft with only these nodes, in their order; each one's parent is among them."""
    places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
    return Draft(
        [draft.token_ids[node] for node in nodes],
        [places[draft.parents[node]] for node in nodes],
        is_predicted=draft.is_predicted,
        confidences=None if draft.confidences is None else [draft.confidences[node] for node in nodes],
    )
