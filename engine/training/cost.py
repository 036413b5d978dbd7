"""Measures the time of a decode step of one request, with the engine's forward pass.

A model that `python -m engine.execution.cpu` has compiled runs compiled, as when it is served.
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
    """Return the median time of 50 decode steps after 256 tokens, for each model.

    Models take turns, so that other load on the machine affects all of them alike and leaves their ratio.
    """
    steps = [_DecodeStep(folder) for folder in folders]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_REPEATS):
        for step, step_times in zip(steps, times, strict=True):
            step_times.append(step.time_ms())
    return [statistics.median(step_times) for step_times in times]


class _DecodeStep:
    """A model with a filled KV cache and the batch of the next token."""

    def __init__(self, folder: Path) -> None:
        self.backend = load_backend(ModelConfig(str(folder), compile="auto"))
        self.backend.warm_up(compile_missing=False)
        context = min(CONTEXT_TOKENS, self.backend.info.max_model_len - 1)
        blocks = list(range(context // _BLOCK_SIZE + 1))
        kv = self.backend.allocate_kv(len(blocks), _BLOCK_SIZE)
        self.backend.run(build([ForwardRow([1] * context, 0, blocks, 1)], kv))
        # Running it repeatedly writes the same keys and values to the same slot.
        self.batch = build([ForwardRow([1], context, blocks, 1)], kv)
        self.time_ms()

    def time_ms(self) -> float:
        started = time.perf_counter()
        self.backend.run(self.batch)
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - started)
