"""Footprint: computes a model's memory from its configuration and file headers, before it loads."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from engine.config import EngineConfig, ModelConfig
from engine.execution.memory import Footprint
from engine.models.causal_lm import kv_shape
from engine.models.files import weight_files
from engine.models.registry import context_length, read_config
from engine.models.shards import plan_of, style_of

_LOGIT_COPIES = 4
"""Logits, scores, and copies made by shaping and log probabilities."""
_MASK_COPIES = 2
_ACTIVATION_COPIES = 6


def footprint(
    config: ModelConfig, engine: EngineConfig, *, dtype: torch.dtype, bytes_per_weight: int, world_size: int = 1
) -> Footprint:
    """Return the footprint of a model, or of one of its ranks, without loading it.

    Raises:
        ModelError: there is no such model, or it cannot be served.
    """
    model_config = read_config(config)
    weight_bytes = _num_weights(config, model_config, world_size) * bytes_per_weight
    return of_weights(config.path, weight_bytes, model_config, engine, dtype=dtype, world_size=world_size)


def of_weights(
    name: str,
    weight_bytes: int,
    model_config: PreTrainedConfig,
    engine: EngineConfig,
    *,
    dtype: torch.dtype,
    world_size: int = 1,
) -> Footprint:
    """Return the footprint of a model with `weight_bytes` of weights on each rank; a pure function."""
    text = model_config.get_text_config()
    shape = kv_shape(model_config, world_size)
    longest = context_length(model_config)
    max_model_len = min(engine.max_model_len or longest, longest)
    layer_token_bytes = shape.kv_heads * (shape.key_dim + shape.value_dim) * dtype.itemsize
    num_tokens = engine.max_num_batched_tokens
    num_logits = min(num_tokens, engine.max_num_seqs * (1 + engine.num_speculative_tokens))
    inner = getattr(text, "intermediate_size", None) or getattr(text, "d_ff", None) or 4 * text.hidden_size
    # Where scores are biased by distance, each head has a mask of its own.
    num_masks = _MASK_COPIES * (shape.kv_heads if model_config.is_encoder_decoder else 1)
    widest = max(text.hidden_size, *(inner if isinstance(inner, list) else [inner]))
    workspace_bytes = (
        num_masks * num_tokens * max_model_len * dtype.itemsize
        + 2 * max_model_len * layer_token_bytes
        + _ACTIVATION_COPIES * num_tokens * widest * dtype.itemsize
        + _LOGIT_COPIES * num_logits * text.vocab_size * torch.float32.itemsize
    )
    return Footprint(name, weight_bytes, workspace_bytes, shape.layers * layer_token_bytes, max_model_len)


def _num_weights(config: ModelConfig, model_config: PreTrainedConfig, world_size: int) -> int:
    """Return one rank's number of weights, from the file headers."""
    plan = plan_of(config.path, model_config, world_size) if world_size > 1 else {}
    return sum(_num_weights_in(file, plan, world_size) for file in weight_files(config))


def _num_weights_in(file: Path, plan: dict[str, str], world_size: int) -> int:
    total = 0
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a dict
            size = 1
            for length in weights.get_slice(name).get_shape():
                size *= length
            is_sliced = style_of(plan, name.rpartition(".")[0]) is not None
            total += size // world_size if is_sliced else size
    return total
