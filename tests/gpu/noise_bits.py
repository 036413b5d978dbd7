"""The noise of the device against the CPU's: uniform numbers bit by bit, Gumbel noise by its largest difference."""

import time
from typing import Any

import torch

from engine.sampling import noise

_VOCAB = 131_072


def noise_bits(device: str, *, num_rows: int) -> dict[str, Any]:
    """Compare `num_rows` rows of noise over a vocabulary."""
    cpu, other = torch.device("cpu"), torch.device(device)
    token_ids = torch.arange(_VOCAB, dtype=torch.int32)
    num_different, farthest, num_draws_moved = 0, 0.0, 0
    started = time.perf_counter()
    for first in range(0, num_rows, 64):
        keys = noise.keys(range(first, first + 64), range(64), noise.TARGET_STREAM, cpu)
        expected = noise.uniform(keys, token_ids)
        found = noise.uniform(keys.to(other), token_ids.to(other)).cpu()
        num_different += int((expected != found).sum())
        gumbel = noise.plain_gumbel(keys, token_ids)
        gumbel_found = noise.plain_gumbel(keys.to(other), token_ids.to(other)).cpu()
        farthest = max(farthest, float((gumbel - gumbel_found).abs().max()))
        num_draws_moved += int((gumbel.argmax(-1) != gumbel_found.argmax(-1)).sum())
    return {
        "numbers": num_rows * _VOCAB,
        "uniform_different": num_different,
        "largest_gumbel_difference": farthest,
        "argmax_different": num_draws_moved,
        "seconds": round(time.perf_counter() - started, 1),
    }
