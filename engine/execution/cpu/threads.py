"""Threads: how many of them a pass runs with.

The rule: one thread for every 64 million multiplications of a pass, at most the cores that the worker has. Where a pass
computes less, waking a second thread takes longer than it saves.
"""

import torch

MULTIPLICATIONS_PER_THREAD = 64_000_000


def num_threads(num_weights: int, num_tokens: int, max_threads: int) -> int:
    """Return the threads of a pass over `num_tokens` tokens through a model of `num_weights` weights."""
    return max(1, min(max_threads, num_weights * num_tokens // MULTIPLICATIONS_PER_THREAD))


class Threads:
    """Sets the number of torch's threads before each pass of one model."""

    def __init__(self, num_weights: int, max_threads: int) -> None:
        self._num_weights = num_weights
        self.max_threads = max_threads

    def use(self, num_tokens: int) -> None:
        """Have the next pass of this thread, over `num_tokens` tokens, run with its number of threads."""
        torch.set_num_threads(num_threads(self._num_weights, num_tokens, self.max_threads))
