"""Budget: which draft tokens of a round are worth their place in it.

Tokens are taken by their survival, the likeliest first, as long as more of them raise goodput: expected tokens over the
round's time. This is SmartSpec's rule (Liu et al., 2406.14066) for single tokens of each request.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEAST = 0.04
"""A token that is less likely to survive is never taken, however cheap its place in a pass seems."""


class Budget(NamedTuple):
    """The tokens per second of a round, its tokens, and how many draft tokens each request has, [n]."""

    rate: float
    num_tokens: float
    lengths: NDArray[np.int64]


def best_budget(
    num_tokens: float, chances: NDArray[np.float64], depths: NDArray[np.int64], seconds: NDArray[np.float64]
) -> Budget:
    """Return the budget with the most tokens per second; of equal draft tokens, it takes the first.

    Args:
        num_tokens: what the round commits without draft tokens.
        chances: [n, length], the survival of the draft tokens that each request may have.
        depths: [n, length], how long the drafter takes for each token; 0 for copies.
        seconds: [depth + 1, n * length + 1], what the round takes by its deepest token, with 0 to all of them.
    """
    order = np.argsort(-chances, axis=None, kind="stable")
    order = order[chances.ravel()[order] >= _LEAST]
    gains = chances.ravel()[order]
    allowed = depths.ravel()[order] <= np.arange(len(seconds))[:, None]
    zero = np.zeros((len(seconds), 1), int)
    counts = np.append(zero, allowed.cumsum(1), 1)
    tokens = num_tokens + np.append(zero, (gains * allowed).cumsum(1), 1)
    rates = tokens / seconds[np.arange(len(seconds))[:, None], counts]
    depth, end = np.unravel_index(rates.argmax(), rates.shape)
    owners = order[:end][allowed[depth, :end]] // max(1, chances.shape[1])
    return Budget(float(rates[depth, end]), float(tokens[depth, end]), np.bincount(owners, minlength=len(chances)))
