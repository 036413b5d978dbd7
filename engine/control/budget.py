"""Budget: which draft tokens of a round are worth their place in it.

Tokens are taken by their survival, the likeliest first, as long as more of them raise goodput: expected tokens over the
round's time. This is SmartSpec's rule (Liu et al., 2406.14066) for single tokens of each request.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import neg, truediv
from typing import NamedTuple

_LEAST = 0.04
"""A token that is less likely to survive is never taken, however cheap its place in a pass seems."""


class Budget(NamedTuple):
    """The tokens per second of a round, its tokens, and which of the draft tokens it has, as indices."""

    rate: float
    num_tokens: float
    chosen: list[int]


def best_budget(num_tokens: float, survivals: Sequence[float], seconds: Sequence[float]) -> Budget:
    """Return the budget with the most tokens per second; of equal draft tokens, it takes the first.

    Args:
        num_tokens: what the round commits without draft tokens.
        survivals: [n], of the draft tokens that it may have.
        seconds: [n + 1] what it takes with 0 to n of them.
    """
    order = sorted(range(len(survivals)), key=survivals.__getitem__, reverse=True)
    gains = [survivals[i] for i in order]
    tokens = list(accumulate(gains[: bisect_left(gains, -_LEAST, key=neg)], initial=num_tokens))
    rates = list(map(truediv, tokens, seconds))
    rate = max(rates)
    count = rates.index(rate)
    return Budget(rate, tokens[count], order[:count])
