"""Tensor-parallel shards: reads one rank's slices from the safetensors files, by transformers' plan for the model.

Column-wise layers, of which the head is one, keep a slice of their outputs. Row-wise layers keep a slice of their
inputs, and their results are summed over the ranks. Every rank holds embeddings and norms whole. These are plain linear
layers, no DTensor.
"""

import fnmatch

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.models.causal_lm import Shard, kv_shape
from engine.models.layer_attention import ATTENTION_NAME
from engine.models.reducer import register, sum_over_ranks
from engine.models.source import ModelSource

_HEAD = "lm_head"
_WHOLE = {"replicated", "replicated_with_grad_allreduce"}


class RowLinear(nn.Linear):
    """A linear layer over a slice of its inputs, summed over the ranks in float32 and then rounded, once."""

    reducer_key: int

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out], summed over the ranks, for `x` [..., in / world_size]."""
        total: Tensor = sum_over_ranks(self.partial(x), self.reducer_key).to(x.dtype)
        return total if self.bias is None else total + self.bias

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum, [..., out] float32."""
        return F.linear(x.float(), self.weight.float())


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
    module.to_empty(device=device)
    _restore_buffers(module)
    module.tie_weights()  # type: ignore[operator]
    _read(source, module, styles, shard)
    head = module.get_output_embeddings()  # type: ignore[operator]
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
    if unsupported := sorted(set(plan.values()) - {"colwise", "rowwise"} - _WHOLE):
        raise ModelError(f"{path} is {config.model_type}, whose tensor parallel plan needs {', '.join(unsupported)}")
    if not config.tie_word_embeddings and config.get_text_config().vocab_size % world_size == 0:
        plan[_HEAD] = "colwise"
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
        sliced.reducer_key = register(shard.reducer)
    setattr(parent, name.rpartition(".")[2], sliced)


def _restore_buffers(module: nn.Module) -> None:
    """Let transformers recompute buffers that are in no file, such as rotary frequencies."""
    for child in module.modules():
        if child._non_persistent_buffers_set:
            module._init_weights(child)  # type: ignore[operator]


def _read(source: ModelSource, module: nn.Module, styles: dict[str, str], shard: Shard) -> None:
    """Copy this rank's slice of every weight from the files into the model; tied names share a tensor."""
    tensors = module.state_dict(keep_vars=True)
    loaded = set()
    for file in source.weight_files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                if name not in tensors:
                    continue
                layer, _, parameter = name.rpartition(".")
                tensors[name].data.copy_(_slice(weights.get_slice(name), styles.get(layer), parameter, shard))
                loaded.add(id(tensors[name]))
    if missing := [name for name, tensor in tensors.items() if id(tensor) not in loaded]:
        raise ModelError(f"{source.path} lacks the weights {', '.join(sorted(missing)[:3])}")


def _slice(weight: "object", style: str | None, parameter: str, shard: Shard) -> Tensor:
    shape = weight.get_shape()  # type: ignore[attr-defined]
    axis = {"colwise": 0, "rowwise": 1}.get(style or "")
    if axis is None or (parameter == "bias" and style == "rowwise"):
        return weight[:]  # type: ignore[index, no-any-return]
    size = shape[axis] // shard.world_size
    window = slice(shard.rank * size, (shard.rank + 1) * size)
    return weight[window] if axis == 0 else weight[:, window]  # type: ignore[index, no-any-return]
