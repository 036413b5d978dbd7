"""Budget: which draft tokens of a round are worth their time.

Tokens are added by survival, the likeliest first, as long as they raise goodput: expected tokens over the round's time.
This is SmartSpec's rule (Liu et al., 2406.14066), applied to single tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEAST = 0.04
"""A token that is less likely to survive is never taken, however cheap it seems."""


class Budget(NamedTuple):
    """A round's tokens per second, its expected tokens, and each request's draft length, [n]."""

    rate: float
    num_tokens: float
    lengths: NDArray[np.int64]


def best_budget(
    num_tokens: float, chances: NDArray[np.float64], depths: NDArray[np.int64], seconds: NDArray[np.float64]
) -> Budget:
    """Return the budget with the most tokens per second.

    Args:
        num_tokens: how many tokens the round commits without draft tokens.
        chances: [n, length], the survival of the draft tokens that each request may have.
        depths: [n, length], the drafter's steps up to each token; 0 for copies.
        seconds: [depth + 1, n * length + 1], the round's time by the drafter's steps and by the number of draft tokens.
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
