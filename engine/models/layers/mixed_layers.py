"""Layers that attend to chunks of positions, windows, or another layer's keys and values.

transformers uses masks for these, which our attention function does without: attention modules are told at load.
"""

import inspect
import sys
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from engine.models.layers.fusion import fuse_projections
from engine.models.layers.latent import cache_latents
from engine.models.layers.layer_state import StateShape
from engine.models.layers.linear_layers import layer_kinds, prepare_linear_layers

CHUNKED = "chunked_attention"


def num_shared(config: PreTrainedConfig) -> int:
    """Return how many of the last layers share the keys and values of layers before them."""
    text = config.get_text_config()
    count: int = getattr(text, "num_kv_shared_layers", None) or 0
    return count if count < text.num_hidden_layers else 0


def prepare_layers(module: nn.Module, config: PreTrainedConfig) -> tuple[list[StateShape], int]:
    """Replace and describe the layers of a loaded model; return what `prepare_linear_layers` returns."""
    cache_latents(module)
    fuse_projections(module)
    states = prepare_linear_layers(module, config)
    describe_layers(module, config)
    return states


def describe_layers(module: nn.Module, config: PreTrainedConfig) -> None:
    """Tell attention modules their chunks, windows and query temperatures, and whose keys and values they share."""
    text: Any = config.get_text_config()
    kinds = layer_kinds(config)
    unshared = kinds[: text.num_hidden_layers - num_shared(config)]
    attention: Any
    for attention in [child for child in module.modules() if hasattr(child, "layer_idx")]:
        kind = kinds[attention.layer_idx] if kinds else None
        if kind == CHUNKED:
            attention.chunk = text.attention_chunk_size
        if kind in (None, "sliding_attention") and _masks_window(attention):
            attention.window = getattr(text, "sliding_window", None)
        if getattr(attention, "is_kv_shared_layer", False):
            attention.kv_layer = max(layer for layer, of_layer in enumerate(unshared) if of_layer == kind)
        if getattr(attention, "attn_temperature_tuning", False):
            attention.attn_temperature_tuning = False
            attention.temperature = None if attention.use_rope else (attention.floor_scale, attention.attn_scale)


def _masks_window(attention: nn.Module) -> bool:
    """Return whether a layer states its window in its mask only, and not to the attention function."""
    code = inspect.unwrap(type(attention).forward).__code__
    is_handed = "sliding_window" in (*code.co_names, *code.co_consts)
    return not is_handed and hasattr(sys.modules[type(attention).__module__], "create_sliding_window_causal_mask")


def why_mixed(config: PreTrainedConfig) -> str | None:
    """Return why passes of a model with such layers are not compiled; None if it has none."""
    text: Any = config.get_text_config()
    if num_shared(config) or text.per_layer_attributes:
        return "its layers differ in their keys and values"
    is_tuned = getattr(text, "attn_temperature_tuning", False)
    is_chunked = is_tuned or CHUNKED in layer_kinds(config)
    return "its layers attend in chunks or by positions" if is_chunked else None
