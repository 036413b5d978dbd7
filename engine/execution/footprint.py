"""Footprint: computes a model's memory from its configuration and file headers, before it loads."""

import copy
import math
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedConfig

from engine.config import EngineConfig
from engine.execution.memory import Footprint
from engine.heads.config import read_head_config
from engine.models.causal_lm import kv_shape
from engine.models.layers.latent import EXPANDING
from engine.models.layers.linear_layers import planned_states
from engine.models.layers.packed_formats import FORMATS
from engine.models.layers.quantization import QuantizedLinear, layer_bytes, linear_layers
from engine.models.loader import kv_dtype, skeleton_of
from engine.models.packed_weights import PACKED, check_quantization, load_packed
from engine.models.shards import ROWS, plan_of, style_of
from engine.models.source import ModelSource
from engine.models.weights import FileNames, mapped_tensors

_LOGIT_COPIES = 4
"""Logits, scores, and copies made by shaping and log probabilities."""
_MASK_COPIES = 2
_ACTIVATION_COPIES = 6


def footprint(
    source: ModelSource, engine: EngineConfig, *, dtype: torch.dtype, bytes_per_weight: int, world_size: int = 1
) -> Footprint:
    """Return a model's footprint on each rank, without loading it; raise ModelError if it cannot be served."""
    configuration = source.loaded_configuration
    check_quantization(source)
    weight_bytes = _weight_bytes(source, dtype, bytes_per_weight, world_size)
    longest, cache_dtype = source.kind.context_length(configuration), kv_dtype(source.config)
    needs = of_weights(
        source.path, weight_bytes, configuration, engine, longest=longest, dtype=dtype, world_size=world_size,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    return _with_head(needs, source, engine, dtype, bytes_per_weight)


def footprint_with_vllm(source: ModelSource, engine: EngineConfig, *, dtype: torch.dtype, world_size: int) -> Footprint:
    """Return a model's footprint on each rank of vLLM, from its files' headers alone."""
    num_weights = sum(map(math.prod, source.weight_shapes.values()))
    stored_bytes = sum(path.stat().st_size for path in source.weight_files)
    weight_bytes = num_weights * dtype.itemsize if source.saved_format is None else stored_bytes
    needs = of_weights(
        source.path, weight_bytes // world_size, source.configuration, engine,
        longest=source.max_model_len, dtype=dtype, world_size=world_size, cache_dtype=kv_dtype(source.config),
    )  # fmt: skip
    return _with_head(needs, source, engine, dtype, dtype.itemsize)


def _with_head(
    target: Footprint, source: ModelSource, engine: EngineConfig, dtype: torch.dtype, bytes_per_weight: int
) -> Footprint:
    """Add the whole head of a target, if it has one, to the footprint of a rank."""
    if (head := source.head) is None:
        return target
    # The target's files are counted whole, MTP layers included.
    num_weights = 0 if head.path == source.path else sum(map(math.prod, head.weight_shapes.values()))
    config, cache_dtype = read_head_config(head, source), kv_dtype(source.config) or dtype
    shape, width = kv_shape(config.layers, 1), len(config.taps) * config.target_hidden_size
    return replace(
        target,
        weight_bytes=target.weight_bytes + num_weights * bytes_per_weight,
        # The tapped outputs, as the target's layers leave them and joined.
        workspace_bytes=target.workspace_bytes + 2 * engine.max_num_batched_tokens * width * dtype.itemsize,
        kv_token_bytes=target.kv_token_bytes
        + shape.token_numbers * cache_dtype.itemsize
        + config.layers.hidden_size * dtype.itemsize,
    )


def of_weights(
    name: str,
    weight_bytes: int,
    model_config: PreTrainedConfig,
    engine: EngineConfig,
    *,
    longest: int,
    dtype: torch.dtype,
    world_size: int = 1,
    cache_dtype: torch.dtype | None = None,
) -> Footprint:
    """Return the footprint of a model with `weight_bytes` of weights on each rank; a pure function."""
    text = model_config.get_text_config()
    shape = kv_shape(model_config, world_size)
    max_model_len = min(engine.max_model_len or longest, longest)
    state_shapes, state_chunk = planned_states(model_config)
    num_tokens = engine.max_num_batched_tokens + state_chunk  # a chunk may exceed the rest of the budget
    num_logits = min(num_tokens, engine.max_num_seqs * (1 + engine.num_speculative_tokens))
    inner = getattr(text, "intermediate_size", None) or getattr(text, "d_ff", None) or 4 * text.hidden_size
    # Where scores are biased by distance, each head has its own mask.
    has_biases = getattr(text, "relative_attention_num_buckets", None) is not None
    num_masks = _MASK_COPIES * (shape.kv_heads if has_biases else 1)
    widest = max(text.hidden_size, *(inner if isinstance(inner, list) else [inner]))
    workspace_bytes = (
        num_masks * num_tokens * max_model_len * dtype.itemsize
        + 2 * max_model_len * shape.kv_heads * (shape.key_dim + shape.value_dim) * dtype.itemsize
        + _ACTIVATION_COPIES * num_tokens * widest * dtype.itemsize
        + _LOGIT_COPIES * num_logits * text.vocab_size * torch.float32.itemsize
    )
    kv_token_bytes = shape.token_numbers * (cache_dtype or dtype).itemsize
    state_bytes = sum(shape.num_bytes(engine.num_speculative_tokens, dtype.itemsize) for shape in state_shapes)
    return Footprint(name, weight_bytes, workspace_bytes, kv_token_bytes, max_model_len, state_bytes)


def _weight_bytes(source: ModelSource, dtype: torch.dtype, bytes_per_weight: int, world_size: int) -> int:
    quantization, saved = source.config.quantization, source.saved_format
    plan = plan_of(source, world_size) if world_size > 1 else {}
    if source.config.head_only or saved == "gguf":
        return sum(p.numel() for p in skeleton_of(source, dtype).parameters()) * bytes_per_weight
    if saved in FORMATS:
        return _packed_bytes(source, copy.deepcopy(skeleton_of(source, dtype)), bytes_per_weight)
    module = skeleton_of(source, dtype) if plan or quantization != "none" else None
    names, quantized = FileNames(module) if module is not None else None, dict[str, int]()
    for path, linear in linear_layers(module).items() if module is not None and quantization != "none" else ():
        if not path.endswith(EXPANDING):
            quantized[f"{path}.weight"] = layer_bytes(quantization, linear.out_features, linear.in_features)
    total = 0
    for key, weight in mapped_tensors(source):
        name = names.parameter(key) if names else key
        layer, _, parameter = name.rpartition(".")
        style = style_of(plan, layer) or style_of(plan, name)
        is_whole = style is None or (style == ROWS and parameter == "bias")
        size = weight.numel() * (weight.element_size() if weight.dtype in PACKED else bytes_per_weight)
        total += quantized.get(name, size if is_whole else size // world_size)
    return total


def _packed_bytes(source: ModelSource, module: nn.Module, bytes_per_weight: int) -> int:
    load_packed(source, module, FileNames(module), torch.float32, torch.device("meta"))
    for name, child in list(module.named_modules()):
        if name.endswith(EXPANDING):
            module.set_submodule(name, torch.nn.Linear(child.in_features, child.out_features, False, "meta"))
    layers = {name for name, child in module.named_modules() if isinstance(child, QuantizedLinear)}
    buffers = [(name, tensor) for name, tensor in module.named_buffers() if name.rpartition(".")[0] in layers]
    total = 0
    for name, tensor in [*module.named_parameters(), *buffers]:
        layer, _, parameter = name.rpartition(".")
        is_packed = layer in layers and parameter != "bias"
        total += tensor.nbytes if is_packed else tensor.numel() * bytes_per_weight
    return total
