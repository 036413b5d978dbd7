"""Tensor-parallel shards: reads one rank's slices of a dense model's floats, by transformers' plan for the model.

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

from engine.errors import ModelError
from engine.models.causal_lm import Reducer, Shard, holds_attention_whole, kv_shape
from engine.models.layers.linear_layers import has_state
from engine.models.source import ModelSource
from engine.models.weights import FileNames, assign, fill

_COLUMNS, ROWS, _PACKED_COLUMNS, _EXPERTS = "colwise", "rowwise", "packed_colwise", "moe_tp_experts"
_WHOLE = {
    *("replicated", "replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj", "local_params"),
    *("colwise_gather_output", "rowwise_split_input"),
}
"""Styles of layers that every rank holds whole."""

_LATENT = dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in ("q", "q_b", "kv_b")), _COLUMNS)
_FUSED = {"layers.*.mlp.gate_up_proj": _PACKED_COLUMNS, "layers.*.mlp.down_proj": ROWS}
_MORE: Mapping[str, Mapping[str, str]] = {  # what plans in transformers lack, by `model_type`
    **dict.fromkeys(("glm", "glm4", "phi3"), _FUSED),
    "gpt_oss": {"layers.*.mlp.experts": _EXPERTS},
    "youtu": _LATENT | {"layers.*.self_attn.o_proj": ROWS},
}


class RowLinear(nn.Linear):
    """A linear layer over a slice of its inputs, summed over the ranks in float32."""

    reducer: Reducer

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        total = self.reducer.sum(F.linear(x, self.weight).float()).to(x.dtype)
        return total if self.bias is None else total + self.bias


def load_shard(source: ModelSource, module: nn.Module, shard: Shard, device: torch.device) -> nn.Module:
    """Give a model on the meta device this rank's slice of every weight; raise ModelError if that is unsupported."""
    plan = plan_of(source, shard.world_size)
    for name, child in list(module.named_modules()):
        style = style_of(plan, name)
        if style is not None and isinstance(child, nn.Linear):
            _narrow(module, name, style, shard)
    for name, parameter in list(module.named_parameters()):
        if style_of(plan, name) == _COLUMNS and parameter.dim() == 1:
            assign(module, [name], parameter.new_empty(len(parameter) // shard.world_size))
    fill(source, module, device, FileNames(module), shard.rank, shard.world_size)
    return module


def plan_of(source: ModelSource, world_size: int) -> dict[str, str]:
    """Return tensor-parallel styles by patterns of layer names; raise ModelError if there is no plan that is served."""
    path, config, text = source.path, source.configuration, source.configuration.get_text_config()
    styles = {**(config.base_model_tp_plan or {}), **_MORE.get(config.model_type, {})}
    plan = {f"model.{name}": style for name, style in styles.items()}
    if has_state(config):
        raise ModelError(f"{path} is {config.model_type}, whose linear layers' states are not split over ranks")
    is_quantized = source.saved_format is not None or source.config.quantization != "none"
    # Gemma 4's plan names experts that its dense models lack.
    has_experts = _EXPERTS in plan.values() and getattr(text, "enable_moe_block", True)
    if is_quantized or has_experts:
        kind = "quantised" if is_quantized else "a mixture of experts"
        raise ModelError(f"{path} is {kind}, which over several ranks is served by execution=vllm")
    if not plan:
        raise ModelError(f"{path} is {config.model_type}, which has no tensor parallel plan in transformers")
    if unsupported := sorted(set(plan.values()) - {_COLUMNS, ROWS, _PACKED_COLUMNS, _EXPERTS} - _WHOLE):
        raise ModelError(f"{path} is {config.model_type}, whose tensor parallel plan needs {', '.join(unsupported)}")
    if not set(plan.values()) - _WHOLE:
        raise ModelError(f"{path} is {config.model_type}, whose tensor parallel plan leaves every layer whole")
    counts = {} if holds_attention_whole(text) else {text.num_attention_heads: "attention"}
    if counts and not getattr(text, "kv_lora_rank", None):
        counts |= {heads: "key/value" for heads, _, _ in kv_shape(config, 1).sizes}
    for count, kind in counts.items():
        if count % world_size:
            raise ModelError(f"{path} has {count} {kind} heads, not divisible by tensor_parallel_size {world_size}")
    return plan


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return how a layer is sliced; None if every rank holds it whole."""
    for pattern, style in plan.items():
        if style not in _WHOLE and fnmatch.fnmatchcase(name, pattern):
            return style
    return None


def _narrow(module: nn.Module, name: str, style: str, shard: Shard) -> None:
    whole = module.get_submodule(name)
    assert isinstance(whole, nn.Linear)
    size = whole.in_features if style == ROWS else whole.out_features
    parts = 2 if style == _PACKED_COLUMNS else 1
    if size % (parts * shard.world_size):
        raise ModelError(f"{name} has size {size // parts}, not divisible by tensor_parallel_size {shard.world_size}")
    size, has_bias, like = size // shard.world_size, whole.bias is not None, whole.weight
    sliced: Any = nn.Linear(whole.in_features, size, has_bias, like.device, like.dtype)
    if style == ROWS:
        sliced = RowLinear(size, whole.out_features, has_bias, like.device, like.dtype)
        sliced.reducer = shard.reducer
    if style == _PACKED_COLUMNS:
        for parameter in sliced.parameters():
            parameter.packed_axis = 0
    module.set_submodule(name, sliced)
