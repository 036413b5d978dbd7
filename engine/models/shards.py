"""Tensor-parallel shards: reads one rank's slices from the safetensors files, by transformers' plan for the model.

Column-wise layers, of which the head is one, keep a slice of their outputs. Row-wise layers keep a slice of their
inputs, and their results are summed over the ranks. Every rank holds embeddings and norms whole. These are plain linear
layers, no DTensor.
"""

import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import Quantization
from engine.errors import ModelError
from engine.models.causal_lm import Shard, kv_shape
from engine.models.layers.experts import group_experts, slice_experts
from engine.models.layers.layer_attention import ATTENTION_NAME
from engine.models.layers.packed_formats import saved_format
from engine.models.layers.quantization import GROUP_SIZE, QuantizedLinear, on_meta
from engine.models.layers.reducer import register, sum_over_ranks
from engine.models.packed_weights import load_packed
from engine.models.source import ModelSource
from engine.models.weights import FileNames, fill

_HEAD = "lm_head"
_EXPERTS = "moe_tp_experts"
_WHOLE = {"replicated", "replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles of layers that every rank holds whole; embeddings are only looked up."""


class RowLinear(nn.Linear):
    """A linear layer over a slice of its inputs, whose partial products are summed over the ranks in float32."""

    reducer_key: int

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out], summed over the ranks, for `x` [..., in / world_size]."""
        return _sum(self, x)

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum, [..., out] float32."""
        return F.linear(x, self.weight).float()


class QuantizedRowLinear(QuantizedLinear):
    """The same with quantised weights, whose scales are those of all inputs."""

    reducer_key: int

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out], summed over the ranks, for `x` [..., in / world_size]."""
        return _sum(self, x)


def _sum(layer: RowLinear | QuantizedRowLinear, x: Tensor) -> Tensor:
    total: Tensor = sum_over_ranks(layer.partial(x), layer.reducer_key).to(x.dtype)
    return total if layer.bias is None else total + layer.bias


def load_shard(source: ModelSource, shard: Shard, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build the model on the meta device, replace its sliced layers, and read this rank's slice of every weight.

    Raises:
        ModelError: the model has no plan, an unsupported style, or sizes that are not divisible by the ranks.
    """
    plan = plan_of(source, shard.world_size)
    module = on_meta(source.configuration, attn_implementation=ATTENTION_NAME, dtype=dtype)
    styles = {
        name: style
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and (style := style_of(plan, name))
    }
    for name, style in styles.items():
        _narrow(module, name, style, shard, source.config.quantization)
    if sliced := [(name, child) for name, child in module.named_modules() if style_of(plan, name) == _EXPERTS]:
        group_experts(module)
    for name, child in sliced:
        slice_experts(child, name, shard.reducer)
    head = module.get_output_embeddings()  # type: ignore[operator]
    to_round = {
        name: child
        for name, child in module.named_modules()
        if source.config.quantization != "none" and isinstance(child, nn.Linear) and child is not head
    }
    for layer in to_round.values():
        if isinstance(layer, RowLinear):  # scales are those of all ranks' inputs
            inputs = layer.in_features * shard.world_size
            layer.weight = nn.Parameter(torch.empty(layer.out_features, inputs, dtype=dtype, device="meta"))

    def rounded(name: str, _whole: Tensor, weight: Tensor) -> Tensor | None:
        layer_name, _, parameter = name.rpartition(".")
        if parameter != "weight" or layer_name not in to_round:
            return weight
        module.set_submodule(layer_name, _rounded(weight, to_round[layer_name], source.config.quantization, shard))
        return None

    def quantized(linear: nn.Linear, *tensors: Any) -> QuantizedLinear:
        if not isinstance(linear, RowLinear):
            return QuantizedLinear(*tensors)
        layer = QuantizedRowLinear(*tensors)
        layer.reducer_key = linear.reducer_key
        return layer

    names, ranks = FileNames(module), (shard.rank, shard.world_size)
    is_packed = saved_format(source.configuration) is not None
    full = load_packed(source, module, names, dtype, device, *ranks, quantized) if is_packed else None
    fill(source, module, device, names, *ranks, rounded, full or ())
    if source.configuration.tie_word_embeddings and head.out_features % shard.world_size == 0:
        for name, whole in list(head.named_parameters()):  # the weight's slice shares the memory of the embeddings
            part = whole.tensor_split(shard.world_size)[shard.rank]
            setattr(head, name, nn.Parameter(part, requires_grad=False))
        head.out_features //= shard.world_size
    return module


def plan_of(source: ModelSource, world_size: int) -> dict[str, str]:
    """Return transformers' tensor-parallel plan for a model, and the head's: styles by patterns of layer names.

    Raises:
        ModelError: there is none, or it has an unsupported style.
    """
    path, config = source.path, source.configuration
    plan = {f"model.{name}": style for name, style in (config.base_model_tp_plan or {}).items()}
    if not plan:
        raise ModelError(f"{path} is {config.model_type}, which has no tensor parallel plan in transformers")
    others = {style for name, style in plan.items() if plan.get(name.rpartition(".")[0]) != _EXPERTS}
    if unsupported := sorted(others - {"colwise", "rowwise", _EXPERTS} - _WHOLE):
        raise ModelError(f"{path} is {config.model_type}, whose tensor parallel plan needs {', '.join(unsupported)}")
    if "colwise" not in {style for name, style in plan.items() if "att" in name}:
        raise ModelError(
            f"{path} is {config.model_type}, whose tensor parallel plan in transformers leaves attention whole"
        )
    if not config.tie_word_embeddings and config.get_text_config().vocab_size % world_size == 0:
        plan[_HEAD] = "colwise"
    for kv_heads in {heads for heads, _, _ in kv_shape(config, 1).sizes if heads % world_size}:
        raise ModelError(f"{path} has {kv_heads} key/value heads, not divisible by tensor_parallel_size {world_size}")
    return plan


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return how a layer is sliced, colwise or rowwise; None if every rank holds it whole."""
    for pattern, style in plan.items():
        if style not in _WHOLE and fnmatch.fnmatchcase(name, pattern):
            return style
    return None


def _narrow(module: nn.Module, name: str, style: str, shard: Shard, quantization: Quantization) -> None:
    parent = module.get_submodule(name.rpartition(".")[0])
    whole = module.get_submodule(name)
    assert isinstance(whole, nn.Linear)
    size = whole.out_features if style == "colwise" else whole.in_features
    if size % shard.world_size:
        raise ModelError(f"{name} has size {size}, not divisible by tensor_parallel_size {shard.world_size}")
    if style == "rowwise" and quantization == "int4" and size // shard.world_size % GROUP_SIZE:
        raise ModelError(
            f"{name} has {size // shard.world_size} inputs on a rank; int4 needs a multiple of {GROUP_SIZE}"
        )
    has_bias, dtype = whole.bias is not None, whole.weight.dtype
    sliced: nn.Linear
    if style == "colwise":
        sliced = nn.Linear(whole.in_features, size // shard.world_size, has_bias, device="meta", dtype=dtype)
    else:
        sliced = RowLinear(size // shard.world_size, whole.out_features, has_bias, device="meta", dtype=dtype)
        sliced.reducer_key = register(shard.reducer)
    setattr(parent, name.rpartition(".")[2], sliced)


def _rounded(weight: Tensor, linear: nn.Linear, quantization: Quantization, shard: Shard) -> QuantizedLinear:
    """Round a layer's weight, whose inputs are those of all ranks."""
    size = linear.in_features
    if not isinstance(linear, RowLinear):
        return QuantizedLinear.rounded(weight, linear.bias, quantization, slice(0, size))
    inputs = slice(shard.rank * size, (shard.rank + 1) * size)
    layer = QuantizedRowLinear.rounded(weight, linear.bias, quantization, inputs)
    layer.reducer_key = register(shard.reducer)
    return layer
