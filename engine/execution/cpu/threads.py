"""Threads: how many threads a pass runs with.

The rule is one thread per 20 million multiplications of a pass, at most the worker's cores. In smaller passes, waking a
second thread takes longer than it saves.
"""

import torch

MULTIPLICATIONS_PER_THREAD = 20_000_000


def num_threads(num_weights: int, num_tokens: int, max_threads: int) -> int:
    """Return the number of threads for a pass of `num_tokens` tokens through a model of `num_weights` weights."""
    return max(1, min(max_threads, num_weights * num_tokens // MULTIPLICATIONS_PER_THREAD))


class Threads:
    """Sets torch's number of threads before each pass of one model."""

    def __init__(self, num_weights: int, max_threads: int) -> None:
        self._num_weights = num_weights
        self.max_threads = max_threads

    def use(self, num_tokens: int) -> None:
        """Set the number of threads for a pass of `num_tokens` tokens on the calling thread."""
        torch.set_num_threads(num_threads(self._num_weights, num_tokens, self.max_threads))
