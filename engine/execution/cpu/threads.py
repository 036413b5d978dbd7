"""Threads: how many of them run a model's passes fastest, by how much a pass computes.

More are not always faster: a small model's products are over before the other threads are awake.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.execution.batch import MAX_GROUPED_LENGTH, ForwardRow, build
from engine.models.causal_lm import CausalLM

_SIZES = {"decoding": (1, 5), "a batch": (8, 5), "prompts": (1, 128), "long prompts": (1, 512)}
"""Passes that are tried, as rows and tokens per row."""
_NUM_TURNS = 4
_PASSES_OF_TURN = 3
_MAX_TURN_S = 0.02
_MAX_TRIAL_S = 0.1
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads passes run with: (tokens, threads) pairs, each for passes of up to so many tokens."""

    counts: tuple[tuple[int, int], ...]

    def use(self, num_tokens: int) -> None:
        """Have the next pass, over so many tokens, run with its number of threads."""
        count = next((count for limit, count in self.counts if num_tokens <= limit), self.counts[-1][1])
        torch.set_num_threads(count)

    def __str__(self) -> str:
        parts = zip(_SIZES, self.counts, strict=True)
        return ", ".join(f"{count} for {name}" for name, (_, count) in parts)


def fit_threads(model: CausalLM, limit: int, *, worth: float = 0.9) -> Threads:
    """Try numbers of threads up to `limit` on this model's passes, and keep what pays for each kind of pass.

    Args:
        worth: more threads must take less than this share of the time.
    """
    counts = ((rows * length, _fit(model, limit, worth, rows, length)) for rows, length in _SIZES.values())
    model.threads = Threads(tuple(counts))
    return model.threads


def _fit(model: CausalLM, limit: int, worth: float, rows: int, length: int) -> int:
    """Return the fewest threads that are about as fast as any, from `limit` down for as long as fewer are."""
    best, behind = limit, 1.0
    for count in sorted({2**power for power in range(limit.bit_length())} - {limit}, reverse=True):
        best_s, seconds = _measure(model, (best, count), rows, length)
        relative = behind * seconds / best_s  # to the fastest
        if worth * relative > 1:
            break
        best, behind = count, max(1.0, relative)
    return best


@torch.inference_mode()
def _measure(model: CausalLM, counts: Sequence[int], rows: int, length: int) -> list[float]:
    """Return the median seconds of a pass with each number of threads.

    They take turns, since other processes start at the same time. The first pass of a turn is not counted: threads end
    when their number falls, and are made anew when it rises.
    """
    # Computed eagerly, a row that starts a prompt is computed in another way than one that goes on.
    start = 0 if length > MAX_GROUPED_LENGTH else _BLOCK_SIZE
    blocks = -(-(start + length) // _BLOCK_SIZE)
    kv = model.kv_tensors(1 + rows * blocks, _BLOCK_SIZE)
    tables = [list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(rows)]
    batch = build([ForwardRow([0] * length, start, table, 1) for table in tables], kv)
    model.threads = None
    times: dict[int, list[float]] = {count: [] for count in counts}
    for turn_number in range(_NUM_TURNS):
        for count in counts:
            torch.set_num_threads(count)
            model.forward(batch)
            turn: list[float] = []
            while len(turn) < _PASSES_OF_TURN and sum(turn) < _MAX_TURN_S:
                started = time.perf_counter()
                model.forward(batch)
                turn.append(time.perf_counter() - started)
            times[count] += turn
        if turn_number and sum(map(sum, times.values())) > _MAX_TRIAL_S:
            break
    return [statistics.median_low(times[count]) for count in counts]
