"""What one token costs: a decode step of a single request, through the engine's own forward pass.

A model that was compiled before (`python -m engine.execution.cpu`) runs compiled, as when it is served.
"""

import statistics
import time
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.execution.batch import ForwardRow, build
from engine.execution.registry import load_backend

CONTEXT_TOKENS = 256
_BLOCK_SIZE = 16
_REPEATS = 50


def decode_step_ms(folders: list[Path]) -> list[float]:
    """Time a decode step of each model after 256 tokens: the median of 50, taken in turn.

    In turn, so that whatever else the machine does meanwhile slows all of them alike: what counts is the ratio.
    """
    steps = [_DecodeStep(folder) for folder in folders]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_REPEATS):
        for step, seen in zip(steps, times, strict=True):
            seen.append(step.time_ms())
    return [statistics.median(seen) for seen in times]


class _DecodeStep:
    """A model with a filled cache and the next token to compute."""

    def __init__(self, folder: Path) -> None:
        self.backend = load_backend(ModelConfig(str(folder), compile="auto"))
        self.backend.warm_up(compile_missing=False)
        context = min(CONTEXT_TOKENS, self.backend.info.max_model_len - 1)
        blocks = list(range(context // _BLOCK_SIZE + 1))
        kv = self.backend.allocate_kv(len(blocks), _BLOCK_SIZE)
        self.backend.run(build([ForwardRow([1] * context, 0, blocks, 1)], kv))
        # Computed again and again: it writes the same keys and values to the same place.
        self.batch = build([ForwardRow([1], context, blocks, 1)], kv)
        self.time_ms()

    def time_ms(self) -> float:
        began = time.perf_counter()
        self.backend.run(self.batch)
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)
