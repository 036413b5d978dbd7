"""The memory plan: how many KV blocks and state slots each worker on a device gets, before any worker loads.

Weights and workspace come first. A fraction of the rest goes to KV blocks, the same number for draft and target; the
states of linear layers take at most half of that fraction. The Router imports this file, so it must not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.config import EngineConfig
from engine.errors import ModelError

GPU_FRACTION = 0.9
CPU_FRACTION = 0.5
"""Default fractions of the remaining memory for KV blocks; a CPU's is lower, because other processes share it."""
LEARNER_COPIES = 15
"""Weights, gradients, averages and two moments in float32, and the former weights, over the weights in 16 bits."""
SCRIPT_TOKENS = 256
"""Tokens per request in the default KV cache of an `LLM` on a CPU, because a notebook needs the rest of the memory. The
cache always has room for a request of full length."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one worker's model takes.

    Attributes:
        workspace_bytes: estimate of a pass's masks, gathered keys and values, activations and logits.
        kv_token_bytes: keys and values of one token over all layers.
        state_bytes: one slot for the states of all linear layers.
    """

    name: str
    weight_bytes: int
    workspace_bytes: int
    kv_token_bytes: int
    max_model_len: int
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """A worker's measurements before it loads its model."""

    device: str
    free_bytes: int
    footprint: Footprint


def together(models: Sequence[Footprint]) -> Footprint:
    """Return the footprint of models that one worker loads."""
    added = ("weight_bytes", "workspace_bytes", "kv_token_bytes", "state_bytes")
    sums = {name: sum(getattr(model, name) for model in models) for name in added}
    names, longest = " and ".join(model.name for model in models), max(model.max_model_len for model in models)
    return Footprint(names, max_model_len=longest, **sums)


def with_learner(draft: Footprint, learning: str) -> Footprint:
    """Return the footprint of a draft model with what it takes to learn, if `draft_learning` is on."""
    return replace(draft, weight_bytes=draft.weight_bytes * (1 + LEARNER_COPIES)) if learning == "on" else draft


class CacheSize(NamedTuple):
    """The KV blocks and state slots of a worker, without block 0 and slot 0."""

    num_blocks: int
    num_states: int


def plan_cache(
    free_bytes: int, workers: Sequence[Footprint], config: EngineConfig, *, device: str, is_script: bool = False
) -> CacheSize:
    """Return how many KV blocks and state slots each worker on a device gets.

    Args:
        free_bytes: free memory of the device before any worker has loaded.
        workers: all workers of the device: ranks of the target, and the draft if it shares the device.
        device: identifies the device; "cpu" is the node's memory.
        is_script: whether an `LLM` runs the workers; see `SCRIPT_TOKENS`.

    Raises:
        ModelError: the models do not fit, or leave no room for a request of full length, or for a state per request.
    """
    num_states = config.wanted_states
    if config.num_blocks is not None:
        return CacheSize(config.num_blocks, num_states)
    weights = sum(worker.weight_bytes for worker in workers)
    workspace = sum(worker.workspace_bytes for worker in workers)
    fraction = config.memory_fraction or (CPU_FRACTION if device == "cpu" else GPU_FRACTION)
    budget = int((free_bytes - weights - workspace) * fraction)
    names = " and ".join(dict.fromkeys(worker.name for worker in workers))
    room = (
        f"{names}: {_gib(free_bytes)} are free; weights take {_gib(weights)}, a pass {_gib(workspace)}, and of the "
        f"rest memory_fraction {fraction:g} leaves {_gib(max(budget, 0))}"
    )
    states = ""
    if state_bytes := sum(worker.state_bytes for worker in workers):
        if config.num_states is None:
            num_states = min(num_states, max(budget, 0) // 2 // state_bytes)
        states = f" and {num_states} state slots of {_gib(state_bytes)}"
        if config.num_states is None and num_states <= config.max_num_seqs:
            raise ModelError(
                f"{room} for KV blocks{states} in half of it, but max_num_seqs {config.max_num_seqs} needs "
                f"{config.max_num_seqs + 1} slots; lower max_num_seqs, or raise memory_fraction"
            )
    longest = max(worker.max_model_len for worker in workers)
    length = min(longest, config.max_model_len or longest) + config.num_speculative_tokens
    blocks_per_request = -(-length // config.block_size)
    block_bytes = config.block_size * sum(worker.kv_token_bytes for worker in workers)
    affordable = (budget - num_states * state_bytes) // block_bytes
    if affordable < blocks_per_request:
        raise ModelError(
            f"{room} for KV blocks{states}, but one request of {length:,} tokens needs "
            f"{_gib(blocks_per_request * block_bytes)} of blocks; lower {'max_num_seqs, ' * bool(states)}max_model_len "
            "or max_num_batched_tokens, or raise memory_fraction"
        )
    if is_script and device == "cpu" and config.memory_fraction is None:
        blocks_per_script_request = -(-(SCRIPT_TOKENS + config.num_speculative_tokens) // config.block_size)
        affordable = min(affordable, max(blocks_per_request, blocks_per_script_request * config.max_num_seqs))
    return CacheSize(min(affordable, blocks_per_request * config.max_num_seqs), num_states)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
