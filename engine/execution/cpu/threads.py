"""Threads: how many threads a pass runs with.

The rule is one thread per 20 million multiplications of a pass, at most the worker's cores. In smaller passes, waking a
second thread takes longer than it saves. Where OpenMP's threads sleep between products (OMP_WAIT_POLICY=PASSIVE, as in
served workers, so that idle ones leave their cores to others), waking takes longer, and it is one per 150 million.
"""

import os

import torch

MULTIPLICATIONS_PER_THREAD = 20_000_000
MULTIPLICATIONS_PER_SLEEPING_THREAD = 150_000_000


def num_threads(num_multiplications: int, max_threads: int) -> int:
    """Return the threads of a pass of so many multiplications."""
    are_asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    share = MULTIPLICATIONS_PER_SLEEPING_THREAD if are_asleep else MULTIPLICATIONS_PER_THREAD
    return max(1, min(max_threads, num_multiplications // share))


class Threads:
    """Sets the number of torch's threads before each pass of one model."""

    def __init__(self, num_weights: int, max_threads: int) -> None:
        self._num_weights = num_weights
        self.max_threads = max_threads

    def use(self, num_tokens: int) -> None:
        """Set the number of threads of the calling thread's next pass, which computes `num_tokens` tokens."""
        torch.set_num_threads(num_threads(self._num_weights * num_tokens, self.max_threads))
