"""One rank's shard of a model, sliced straight from the safetensors files by the model's own plan.

Column-wise layers keep a slice of their outputs, row-wise ones a slice of their inputs and are followed by one sum over
the ranks. Embeddings, norms and the head are whole on every rank. No DTensor: plain linear layers and one collective.
"""

import fnmatch
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.hub import cached_file

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.execution.attention import ATTENTION_NAME
from engine.models.causal_lm import Shard

_WHOLE = {"replicated", "replicated_with_grad_allreduce"}


class RowLinear(nn.Linear):
    """A linear layer over a slice of its inputs; the ranks' results are summed."""

    shard: Shard

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole result of `x` [..., in / world_size]."""
        partial = self.shard.all_reduce(F.linear(x, self.weight))
        return partial if self.bias is None else partial + self.bias


def load_shard(
    config: ModelConfig, model_config: PreTrainedConfig, shard: Shard, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Build the model without memory, narrow its sliced layers, and read this rank's part of every weight.

    Raises:
        ModelError: the model has no plan, a style we do not slice, or sizes that the ranks cannot share evenly.
    """
    plan = plan_of(config.path, model_config, shard.world_size)
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model_config, attn_implementation=ATTENTION_NAME, dtype=dtype
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
    _read(config, module, styles, shard)
    return module


def plan_of(path: str, config: PreTrainedConfig, world_size: int) -> dict[str, str]:
    """Return the model's own tensor-parallel plan, by patterns of layer names.

    Raises:
        ModelError: it has none, or one that cannot be followed exactly.
    """
    plan = {f"model.{name}": style for name, style in (config.base_model_tp_plan or {}).items()}
    if not plan:
        raise ModelError(f"{path} is {config.model_type}, which has no tensor parallel plan in transformers")
    if strange := sorted(set(plan.values()) - {"colwise", "rowwise"} - _WHOLE):
        raise ModelError(f"{path} is {config.model_type}, whose tensor parallel plan needs {', '.join(strange)}")
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    if kv_heads % world_size:
        raise ModelError(f"{path} has {kv_heads} key/value heads, not divisible by tensor_parallel_size {world_size}")
    return plan


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return how a layer is sliced, colwise or rowwise; None where every rank holds it whole."""
    for pattern, style in plan.items():
        if style not in _WHOLE and fnmatch.fnmatchcase(name, pattern):
            return style
    return None


def _narrow(module: nn.Module, name: str, style: str, shard: Shard) -> None:
    """Replace the linear layer `name` by this rank's part of it."""
    parent = module.get_submodule(name.rpartition(".")[0])
    whole = module.get_submodule(name)
    assert isinstance(whole, nn.Linear)
    size = whole.out_features if style == "colwise" else whole.in_features
    if size % shard.world_size:
        raise ModelError(f"{name} has size {size}, not divisible by tensor_parallel_size {shard.world_size}")
    has_bias, dtype = whole.bias is not None, whole.weight.dtype
    part: nn.Linear
    if style == "colwise":
        part = nn.Linear(whole.in_features, size // shard.world_size, has_bias, device="meta", dtype=dtype)
    else:
        part = RowLinear(size // shard.world_size, whole.out_features, has_bias, device="meta", dtype=dtype)
        part.shard = shard
    setattr(parent, name.rpartition(".")[2], part)


def _restore_buffers(module: nn.Module) -> None:
    """Let transformers recompute what no file holds (rotary frequencies, scales): the meta device left it empty."""
    for child in module.modules():
        if child._non_persistent_buffers_set:
            module._init_weights(child)  # type: ignore[operator]


def _read(config: ModelConfig, module: nn.Module, styles: dict[str, str], shard: Shard) -> None:
    """Copy this rank's slice of every weight from the files into the model; tied names are one tensor."""
    wanted = module.state_dict(keep_vars=True)
    found = set()
    for file in weight_files(config):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                if name not in wanted:
                    continue
                owner, _, kind = name.rpartition(".")
                wanted[name].data.copy_(_slice(weights.get_slice(name), styles.get(owner), kind, shard))
                found.add(id(wanted[name]))
    if missing := [name for name, tensor in wanted.items() if id(tensor) not in found]:
        raise ModelError(f"{config.path} lacks the weights {', '.join(sorted(missing)[:3])}")


def _slice(weight: "object", style: str | None, kind: str, shard: Shard) -> Tensor:
    """Return this rank's part of one tensor in a file."""
    shape = weight.get_shape()  # type: ignore[attr-defined]
    axis = {"colwise": 0, "rowwise": 1}.get(style or "")
    if axis is None or (kind == "bias" and style == "rowwise"):
        return weight[:]  # type: ignore[index, no-any-return]
    part = shape[axis] // shard.world_size
    window = slice(shard.rank * part, (shard.rank + 1) * part)
    return weight[window] if axis == 0 else weight[:, window]  # type: ignore[index, no-any-return]


def weight_files(config: ModelConfig) -> list[Path]:
    """Return a model's safetensors files."""
    index = cached_file(
        config.path,
        "model.safetensors.index.json",
        revision=config.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    if index is None:
        names = ["model.safetensors"]
    else:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    files = [cached_file(config.path, name, revision=config.revision) for name in names]
    return [Path(file) for file in files if file is not None]
