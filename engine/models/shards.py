"""Tensor-parallel shards: reads one rank's slices from the safetensors files, by transformers' plan for the model.

Column-wise layers keep a slice of their outputs. Row-wise layers keep a slice of their inputs, and their results are
summed over the ranks. Every rank holds embeddings, norms and the head whole. These are plain linear layers, no DTensor.
"""

import fnmatch
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.models.causal_lm import Shard, kv_shape
from engine.models.layer_attention import ATTENTION_NAME
from engine.models.source import ModelSource
from engine.models.weights import Window, fill

_WHOLE = {"replicated", "replicated_with_grad_allreduce"}


class RowLinear(nn.Linear):
    """A linear layer over a slice of its inputs, summed over the ranks."""

    shard: Shard

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out], summed over the ranks, for `x` [..., in / world_size]."""
        partial = self.shard.all_reduce(F.linear(x, self.weight))
        return partial if self.bias is None else partial + self.bias


def load_shard(source: ModelSource, shard: Shard, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build the model on the meta device, replace its sliced layers, and read this rank's slice of every weight.

    Raises:
        ModelError: the model has no plan, an unsupported style, or sizes that are not divisible by the ranks.
    """
    plan = plan_of(source, shard.world_size)
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            source.configuration, attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    styles = {
        name: style
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and (style := style_of(plan, name))
    }
    for name, style in styles.items():
        _narrow(module, name, style, shard)
    fill(source, module, device, partial(_window, styles, shard))
    return module


def plan_of(source: ModelSource, world_size: int) -> dict[str, str]:
    """Return transformers' tensor-parallel plan for a model: styles by patterns of layer names.

    Raises:
        ModelError: there is none, or it has an unsupported style.
    """
    path, config = source.path, source.configuration
    plan = {f"model.{name}": style for name, style in (config.base_model_tp_plan or {}).items()}
    if not plan:
        raise ModelError(f"{path} is {config.model_type}, which has no tensor parallel plan in transformers")
    if unsupported := sorted(set(plan.values()) - {"colwise", "rowwise"} - _WHOLE):
        raise ModelError(f"{path} is {config.model_type}, whose tensor parallel plan needs {', '.join(unsupported)}")
    kv_heads = kv_shape(config, 1).kv_heads
    if kv_heads % world_size:
        raise ModelError(f"{path} has {kv_heads} key/value heads, not divisible by tensor_parallel_size {world_size}")
    return plan


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return how a layer is sliced, colwise or rowwise; None if every rank holds it whole."""
    for pattern, style in plan.items():
        if style not in _WHOLE and fnmatch.fnmatchcase(name, pattern):
            return style
    return None


def _narrow(module: nn.Module, name: str, style: str, shard: Shard) -> None:
    parent = module.get_submodule(name.rpartition(".")[0])
    whole = module.get_submodule(name)
    assert isinstance(whole, nn.Linear)
    size = whole.out_features if style == "colwise" else whole.in_features
    if size % shard.world_size:
        raise ModelError(f"{name} has size {size}, not divisible by tensor_parallel_size {shard.world_size}")
    has_bias, dtype = whole.bias is not None, whole.weight.dtype
    sliced: nn.Linear
    if style == "colwise":
        sliced = nn.Linear(whole.in_features, size // shard.world_size, has_bias, device="meta", dtype=dtype)
    else:
        sliced = RowLinear(size // shard.world_size, whole.out_features, has_bias, device="meta", dtype=dtype)
        sliced.shard = shard
    setattr(parent, name.rpartition(".")[2], sliced)


def _window(styles: dict[str, str], shard: Shard, name: str, shape: torch.Size) -> Window:
    """Return which part of a weight this rank holds, by its name and whole shape."""
    layer, _, parameter = name.rpartition(".")
    style = styles.get(layer)
    if style is None or (style == "rowwise" and parameter == "bias"):
        return ()
    axis = 0 if style == "colwise" else 1
    size = shape[axis] // shard.world_size
    return (slice(None),) * axis + (slice(shard.rank * size, (shard.rank + 1) * size),)
