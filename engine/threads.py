"""Threads: how many of them run a model's decode steps fastest.

More are not always faster: a small model's products are over before the other threads are awake.
"""

import statistics
import time

import torch

from engine.batch import build
from engine.compiled import samples
from engine.model import CausalLM

_NUM_PASSES = 12
_WORTH = 0.95
"""More threads must take less than this share of the time, since other processes want the cores too."""


def fit_threads(model: CausalLM, limit: int) -> int:
    """Try some numbers of threads up to `limit` on this model, keep the fastest and return it."""
    best, best_s = 1, _measure(model, 1)
    for count in sorted({min(2**power, limit) for power in range(1, limit.bit_length() + 1)} - {1}):
        if (seconds := _measure(model, count)) < _WORTH * best_s:
            best, best_s = count, seconds
    torch.set_num_threads(best)
    return best


@torch.inference_mode()
def _measure(model: CausalLM, num_threads: int) -> float:
    """Return the median time of a pass over a row of five tokens, in seconds."""
    torch.set_num_threads(num_threads)
    batch = build(samples()[1], model.kv_tensors(16, 16))
    times = []
    for _ in range(_NUM_PASSES):
        started = time.perf_counter()
        model.forward(batch)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
