"""The memory plan: how many KV blocks every worker on a device gets, decided once, before any of them loads.

Draft and target on one device share it; ranks of a target on CPUs share one memory, too. Weights and workspaces come
first. Of what is left a share goes to keys and values, split so that draft and target hold the same number of tokens.

The Router plans for its group and holds no tensors, so nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ModelError

GPU_FRACTION = 0.9
CPU_FRACTION = 0.5
"""Shares of the memory left for KV blocks by default; other processes want a CPU's memory, too."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one worker's model takes.

    Attributes:
        name: of the model, for messages.
        weight_bytes: this rank's weights, as they are held.
        workspace_bytes: what a pass needs besides, at most: masks, gathered keys and values, activations, logits.
        kv_token_bytes: keys and values of one token over all layers.
        max_model_len: tokens of the longest context.
    """

    name: str
    weight_bytes: int
    workspace_bytes: int
    kv_token_bytes: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What a worker finds before it loads: its device, the memory that is free there, and what its model will take.

    Attributes:
        device: names the device among all of its node's.
        free_bytes: what models and caches may still take.
    """

    device: str
    free_bytes: int
    footprint: Footprint


def plan_kv_blocks(free_bytes: int, workers: Sequence[Footprint], config: EngineConfig, *, device: str) -> int:
    """Return the KV blocks that each worker on a device can have, block 0 aside; a pure function.

    Args:
        free_bytes: of the device, before any of the workers has loaded.
        device: names the device; "cpu" is the node's own memory.
        workers: everything that will be loaded on it: the target's ranks, and the draft if it is there.

    Raises:
        ModelError: the device does not hold the models, or not a single request of full length beside them.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    weights = sum(worker.weight_bytes for worker in workers)
    workspace = sum(worker.workspace_bytes for worker in workers)
    fraction = config.memory_fraction or (CPU_FRACTION if device == "cpu" else GPU_FRACTION)
    budget = int((free_bytes - weights - workspace) * fraction)
    length = min(worker.max_model_len for worker in workers) + config.num_speculative_tokens
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
