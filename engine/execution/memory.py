"""How many KV blocks fit: a number from the configuration, or a share of the memory that is free."""

from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.causal_lm import CausalLM


def count_blocks(model: CausalLM, config: EngineConfig) -> int:
    """Return the number of KV blocks for a model, block 0 included.

    Raises:
        ModelError: the memory does not hold a single request of full length.
    """
    length = min(config.max_model_len or model.info.max_model_len, model.info.max_model_len)
    per_request = -(-(length + config.num_speculative_tokens) // config.block_size)
    if config.num_blocks is not None:
        return config.num_blocks + 1
    wanted = per_request * config.max_num_seqs
    budget = int(free_bytes(model.device) * config.memory_fraction)
    affordable = budget // model.kv_block_bytes(config.block_size)
    if affordable < per_request:
        raise ModelError(
            f"{model.info.name}: one request of {length} tokens needs {per_request} KV blocks, "
            f"but only {affordable} fit into {budget / 2**20:.0f} MiB (memory_fraction {config.memory_fraction})"
        )
    return min(wanted, affordable) + 1


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device; on Linux CPUs what the kernel calls available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelError("cannot read the free memory of this machine; set num_blocks")
