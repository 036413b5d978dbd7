"""Tensor-parallel shards: reads one rank's slices of the weights, by transformers' plan for the model.

Column-wise layers keep a slice of their outputs. Row-wise layers keep a slice of their inputs, and their results are
summed over the ranks. Every rank holds embeddings, norms and the output head whole, and also attention if a norm over
all heads follows its projections. Layers are plain linear layers, not DTensors.
"""

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import Quantization
from engine.errors import ModelError
from engine.models.causal_lm import Shard, holds_attention_whole, kv_shape
from engine.models.layers.experts import group_experts, pack_experts, slice_experts
from engine.models.layers.linear_layers import has_state
from engine.models.layers.packed_formats import FORMATS
from engine.models.layers.quantization import GROUP_SIZE, QuantizedLinear, linear_layers
from engine.models.layers.reducer import Reducer, sum_output
from engine.models.packed_weights import load_packed
from engine.models.source import ModelSource
from engine.models.weights import FileNames, assign, fill

_COLUMNS, ROWS, _EXPERTS = "colwise", "rowwise", "moe_tp_experts"
_PACKED_COLUMNS, _PACKED_ROWS = "packed_colwise", "packed_rowwise"
_WHOLE = {
    *("replicated", "replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj", "local_params"),
    *("colwise_gather_output", "rowwise_split_input"),
}
"""Styles of layers that every rank holds whole."""

_HEADS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "sinks"), _COLUMNS)
_ATTENTION = {f"layers.*.self_attn.{name}": style for name, style in (_HEADS | {"o_proj": ROWS}).items()}
_LAYERS = {"gate_proj": _COLUMNS, "up_proj": _COLUMNS, "down_proj": ROWS}
_DENSE, _SHARED = (
    {f"layers.*.{block}.{name}": style for name, style in _LAYERS.items()} for block in ("mlp", "shared_*")
)
_MIXTURE = {"layers.*.experts": _EXPERTS}
_FUSED = {"layers.*.mlp.gate_up_proj": _PACKED_COLUMNS, "layers.*.mlp.down_proj": ROWS}
_MORE: Mapping[str, Mapping[str, str]] = {  # what plans in transformers lack, by `model_type`
    "afmoe": _ATTENTION | _DENSE | _SHARED,
    **dict.fromkeys(("axk1", "deepseek_v3", "youtu"), _ATTENTION),
    **dict.fromkeys(("gpt_oss", "granitemoe", "granitemoeshared", "phimoe"), _ATTENTION | _MIXTURE),
    **dict.fromkeys(("glm", "glm4", "phi3"), _FUSED),
    "glm4_moe_lite": _ATTENTION | _SHARED,
    "hunyuan_v1_moe": _ATTENTION | _MIXTURE | _SHARED,
    **dict.fromkeys(("qwen2_moe", "solar_open"), _SHARED),
}


class _Summed(nn.Module):
    """A layer over a slice of its inputs, summed over the ranks in float32; left partial if `reducer` is None."""

    reducer: Reducer | None

    def forward(self: Any, x: Tensor) -> Tensor:
        total: Tensor = self.partial(x)
        if self.reducer is None:
            return total
        total = self.reducer.sum(total).to(x.dtype)
        return total if self.bias is None else total + self.bias


class RowLinear(_Summed, nn.Linear):
    """A row-wise linear layer of floats."""

    def quantized(self, *tensors: Any) -> QuantizedLinear:
        layer = QuantizedRowLinear(*tensors)
        layer.reducer = self.reducer
        return layer

    def partial(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).float()


class QuantizedRowLinear(_Summed, QuantizedLinear):
    """A row-wise layer with quantised weights, whose scales were computed over all ranks' inputs."""


def load_shard(
    source: ModelSource, module: nn.Module, shard: Shard, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Give a model on the meta device this rank's slice of every weight; raise ModelError if that is unsupported."""
    plan = plan_of(source, shard.world_size)
    saved = source.saved_format
    for name, child in list(module.named_modules()):
        style = style_of(plan, name)
        if style == _EXPERTS and hasattr(child, "down_proj"):
            is_transposed = style_of(plan, f"{name}.gate_up_proj") == _PACKED_ROWS
            is_transposed = is_transposed or getattr(child, "is_transposed", False)
            slice_experts(child, name, shard.reducer, is_transposed=is_transposed, is_packed=saved == "mxfp4")
        elif style is not None and isinstance(child, nn.Linear):
            _narrow(module, name, style, shard, source.config.quantization)
    for name, parameter in list(module.named_parameters()):
        if style_of(plan, name) == _COLUMNS and parameter.dim() == 1:
            assign(module, [name], parameter.new_empty(len(parameter) // shard.world_size))
    group_experts(module)
    if saved == "mxfp4":
        pack_experts(module)
    _sum_experts(module, shard, dtype)
    to_round = linear_layers(module) if source.config.quantization != "none" else {}
    for layer in to_round.values():
        if isinstance(layer, RowLinear):  # scales are computed over all ranks' inputs
            inputs = layer.in_features * shard.world_size
            layer.weight = nn.Parameter(torch.empty(layer.out_features, inputs, dtype=dtype, device="meta"))

    def rounded(name: str, _whole: Tensor, weight: Tensor) -> Tensor | None:
        layer_name, _, parameter = name.rpartition(".")
        if parameter != "weight" or layer_name not in to_round:
            return weight
        layer: Any = to_round[layer_name]
        first = shard.rank * layer.in_features if isinstance(layer, RowLinear) else 0
        inputs = slice(first, first + layer.in_features)
        new = QuantizedLinear.rounded(weight, layer.bias, source.config.quantization, inputs)
        module.set_submodule(layer_name, getattr(layer, "quantized", QuantizedLinear)(new.values, new.scales, new.bias))
        return None

    names, ranks = FileNames(module), (shard.rank, shard.world_size)
    full = load_packed(source, module, names, dtype, device, *ranks) if saved in FORMATS else None
    fill(source, module, device, names, *ranks, rounded, full or ())
    return module


def plan_of(source: ModelSource, world_size: int) -> dict[str, str]:
    """Return tensor-parallel styles by patterns of layer names; raise ModelError if there is no plan that is served."""
    path, config, text = source.path, source.configuration, source.configuration.get_text_config()
    styles = {**(config.base_model_tp_plan or {}), **_MORE.get(config.model_type, {})}
    plan = {f"model.{name}": style for name, style in styles.items()}
    if has_state(config):
        raise ModelError(f"{path} is {config.model_type}, whose linear layers' states are not split over ranks")
    if not plan:
        raise ModelError(f"{path} is {config.model_type}, which has no tensor parallel plan in transformers")
    others = {style for name, style in plan.items() if plan.get(name.rpartition(".")[0]) != _EXPERTS}
    if unsupported := sorted(others - {_COLUMNS, ROWS, _PACKED_COLUMNS, _EXPERTS} - _WHOLE):
        raise ModelError(f"{path} is {config.model_type}, whose tensor parallel plan needs {', '.join(unsupported)}")
    if _PACKED_COLUMNS in others and source.saved_format in FORMATS:
        raise ModelError(f"{path} is saved quantised, gate and up in one tensor, which is not split over ranks")
    if not set(plan.values()) - _WHOLE:
        raise ModelError(f"{path} is {config.model_type}, whose tensor parallel plan leaves every layer whole")
    counts = {} if holds_attention_whole(text) else {text.num_attention_heads: "attention"}
    if counts and not getattr(text, "kv_lora_rank", None):
        counts |= {heads: "key/value" for heads, _, _ in kv_shape(config, 1).sizes}
    for count, kind in counts.items():
        if count % world_size:
            raise ModelError(f"{path} has {count} {kind} heads, not divisible by tensor_parallel_size {world_size}")
    return plan


def _sum_experts(module: nn.Module, shard: Shard, dtype: torch.dtype) -> None:
    """Sum experts' results over the ranks, together with the shared experts' results where those are sliced."""
    experts = {name for name, child in module.named_modules() if hasattr(child, "own_experts")}
    for name in experts:
        block = module.get_submodule(name.rpartition(".")[0])
        shared = [child for child in block.modules() if isinstance(child, RowLinear)]
        kinds = " ".join(type(child).__name__ for child in block.modules())
        is_summed = (
            shared and "Norm" not in kinds and "Layer" not in kinds and all(child.bias is None for child in shared)
        )
        for child in shared if is_summed else ():
            child.reducer = None
        sum_output(block if is_summed else module.get_submodule(name), shard.reducer, dtype)


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return how a layer is sliced; None if every rank holds it whole."""
    for pattern, style in plan.items():
        if style not in _WHOLE and fnmatch.fnmatchcase(name, pattern):
            return style
    return None


def _narrow(module: nn.Module, name: str, style: str, shard: Shard, quantization: Quantization) -> None:
    whole = module.get_submodule(name)
    assert isinstance(whole, nn.Linear)
    size = whole.in_features if style == ROWS else whole.out_features
    parts = 2 if style == _PACKED_COLUMNS else 1
    if size % (parts * shard.world_size):
        raise ModelError(f"{name} has size {size // parts}, not divisible by tensor_parallel_size {shard.world_size}")
    if style == ROWS and quantization == "int4" and size // shard.world_size % GROUP_SIZE:
        inputs = f"{size // shard.world_size} inputs on a rank"
        raise ModelError(f"{name} has {inputs}; int4 needs a multiple of {GROUP_SIZE}")
    size, has_bias, like = size // shard.world_size, whole.bias is not None, whole.weight
    sliced: Any = nn.Linear(whole.in_features, size, has_bias, like.device, like.dtype)
    if style == ROWS:
        sliced = RowLinear(size, whole.out_features, has_bias, like.device, like.dtype)
        sliced.reducer = shard.reducer
    if style == _PACKED_COLUMNS:
        for parameter in sliced.parameters():
            parameter.packed_axis = 0
    module.set_submodule(name, sliced)
