"""The memory plan: how many KV blocks the workers on a device get, decided before any of them loads.

Draft and target may share a device, and target ranks on CPUs share one memory. Weights and workspace come first; a
fraction of the rest goes to KV blocks, the same number for draft and target.

The Router calls this and does not import torch, so neither does this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ModelError

GPU_FRACTION = 0.9
CPU_FRACTION = 0.5
"""Default fractions of the remaining memory for KV blocks; a CPU's is lower, because other processes share it."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one worker's model takes.

    Attributes:
        workspace_bytes: estimate of a pass's masks, gathered keys and values, activations and logits.
        kv_token_bytes: keys and values of one token over all layers.
    """

    name: str
    weight_bytes: int
    workspace_bytes: int
    kv_token_bytes: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Survey:
    """A worker's measurements before it loads its model."""

    device: str
    free_bytes: int
    footprint: Footprint


def plan_kv_blocks(free_bytes: int, workers: Sequence[Footprint], config: EngineConfig, *, device: str) -> int:
    """Return how many KV blocks each worker on a device gets, without block 0; a pure function.

    Args:
        free_bytes: free memory of the device before any worker has loaded.
        device: identifies the device; "cpu" is the node's memory.
        workers: all workers that will load there: the target's ranks, and the draft if it is on this device.

    Raises:
        ModelError: the models do not fit, or leave no room for a request of full length.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    weights = sum(worker.weight_bytes for worker in workers)
    workspace = sum(worker.workspace_bytes for worker in workers)
    fraction = config.memory_fraction or (CPU_FRACTION if device == "cpu" else GPU_FRACTION)
    budget = int((free_bytes - weights - workspace) * fraction)
    length = max(worker.max_model_len for worker in workers) + config.num_speculative_tokens
    blocks_per_request = -(-length // config.block_size)
    block_bytes = config.block_size * sum(worker.kv_token_bytes for worker in workers)
    affordable = budget // block_bytes
    if affordable < blocks_per_request:
        names = " and ".join(dict.fromkeys(worker.name for worker in workers))
        raise ModelError(
            f"{names}: {_gib(free_bytes)} are free; weights take {_gib(weights)}, a pass {_gib(workspace)}, and of the "
            f"rest memory_fraction {fraction:g} leaves {_gib(max(budget, 0))} for KV blocks, but one "
            f"request of {length:,} tokens needs {_gib(blocks_per_request * block_bytes)}; lower max_model_len or "
            "max_num_batched_tokens, or raise memory_fraction"
        )
    return min(affordable, blocks_per_request * config.max_num_seqs)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
