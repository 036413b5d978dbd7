"""Layers that differ in what they attend to: chunks of positions, or keys and values that another layer has written.

transformers makes masks of chunks, which our attention function does without, and counts positions by itself where
queries depend on them (Llama 4). So each attention module is told at load what the function has to know.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

CHUNKED = "chunked_attention"


def num_shared(config: PreTrainedConfig) -> int:
    """Return how many of the last layers have no keys and values of their own, but share those of layers before."""
    return getattr(config.get_text_config(), "num_kv_shared_layers", None) or 0


def describe_layers(module: nn.Module, config: PreTrainedConfig) -> None:
    """Tell a model's attention modules their chunks, what multiplies their queries, and whose keys they share."""
    text: Any = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    own = kinds[: text.num_hidden_layers - num_shared(config)]
    attention: Any
    for attention in [child for child in module.modules() if hasattr(child, "layer_idx")]:
        kind = kinds[attention.layer_idx] if kinds else None
        if kind == CHUNKED:
            attention.chunk = text.attention_chunk_size
        if getattr(attention, "is_kv_shared_layer", False):
            attention.kv_layer = max(layer for layer, of_layer in enumerate(own) if of_layer == kind)
        if getattr(attention, "attn_temperature_tuning", False):
            attention.attn_temperature_tuning = False
            attention.temperature = None if attention.use_rope else (attention.floor_scale, attention.attn_scale)


def why_mixed(config: PreTrainedConfig) -> str | None:
    """Return why passes of a model with such layers are not compiled; None if it has none."""
    text: Any = config.get_text_config()
    if num_shared(config) or text.per_layer_attributes:
        return "its layers differ in their keys and values"
    is_tuned = getattr(text, "attn_temperature_tuning", False)
    is_chunked = is_tuned or CHUNKED in (getattr(text, "layer_types", None) or ())
    return "its layers attend in chunks or by positions" if is_chunked else None
