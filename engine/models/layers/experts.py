"""Mixture-of-experts layers: every token's experts by two grouped products, whose bits do not depend on the batch.

transformers calls `compute_experts` in every family's experts module, if `group_experts` has chosen it. Pairs of a
token and an expert are sorted by expert, on the device. A token's results are added in float32, in order of its
experts. A tensor-parallel rank holds a slice of every expert, or some whole experts if sizes do not divide; results are
summed behind the layer. gpt-oss' experts stay as saved, in mxfp4: two 4-bit floats a byte, and a power of two for each
group of 32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.mxfp4 import FP4_VALUES

from engine.errors import ModelError
from engine.models.layers.reducer import Reducer

EXPERTS_NAME = "paceline"
_GROUP_SIZE = 32


def experts_of(module: nn.Module) -> list[Any]:
    """Return a model's experts modules whose implementation can be chosen."""
    return [child for child in module.modules() if hasattr(child, "is_transposed")]


def group_experts(module: nn.Module) -> None:
    """Let `compute_experts` compute a model's experts."""
    for experts in experts_of(module):
        experts.config._experts_implementation = EXPERTS_NAME


def compute_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of every token's experts, [tokens, hidden]; a rank's summand is float32.

    module: transformers' experts; index, weights: [tokens, top_k] each token's experts and factors.
    """
    index, places = index.sort(-1)
    weights = weights.gather(1, places)
    is_partial = hasattr(module, "own_experts")
    if is_partial and len(own := module.own_experts) < module.total_experts:  # others: the first expert, times 0
        is_own = (index >= own.start) & (index < own.stop)
        index, weights = torch.where(is_own, index - own.start, 0), weights * is_own
    order, ends = torch.ops.paceline.sort_by_expert(index, module.num_experts)

    def product(rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        scales = getattr(module, f"{name}_scales", None)
        bias = getattr(module, f"{name}_bias", None)
        weight = getattr(module, name if scales is None else f"{name}_blocks")
        weight = weight.flatten(2) if scales is not None else weight.mT if module.is_transposed else weight
        output: Tensor = torch.ops.paceline.grouped_linear(rows, order, ends, weight, bias, dtype, scales)
        return output

    inner = product(hidden, "gate_up_proj" if module.has_gate else "up_proj", hidden.dtype)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    results = product(inner, "down_proj", torch.float32)
    if getattr(module, "has_post_expert_norm", False):
        results = module.post_expert_norm(results.to(hidden.dtype)).float()
    results = results.view(*index.shape, -1) * weights.unsqueeze(-1).float()
    total = results[:, 0]
    for nth in range(1, index.shape[1]):
        total = total + results[:, nth]
    return total if is_partial else total.to(hidden.dtype)


ExpertsInterface.register(EXPERTS_NAME, compute_experts)


def slice_experts(module: Any, name: str, reducer: Reducer, *, is_transposed: bool, is_packed: bool) -> None:
    """Leave room in a module on the meta device for a rank's slice of every expert, or for some whole experts.

    is_transposed: weights are [experts, in, out]; is_packed: a slice has whole groups. Only the first rank adds a bias.
    """
    rank, count = reducer.rank, reducer.world_size
    inner = 1 if is_transposed else 2
    size = module.down_proj.shape[inner]
    num_experts = max(len(parameter) for parameter in module.parameters(recurse=False))
    has_norm, is_grouped = getattr(module, "has_post_expert_norm", False), module in experts_of(module)
    is_sliced = size % (count * _GROUP_SIZE if is_packed else count) == 0 and not has_norm
    if not is_sliced and (num_experts % count or not is_grouped):
        reason = "whose results are normed" if has_norm else f"of size {size}"
        raise ModelError(f"{name} has {num_experts} experts {reason}, not divisible by tensor_parallel_size {count}")
    axes = {"down_proj": inner, "down_proj_bias": None}
    for parameter_name, parameter in list(module.named_parameters(recurse=False)):
        axis = axes.get(parameter_name, 1 if parameter.dim() == 2 else 3 - inner) if is_sliced else 0
        shape = [*parameter.shape]
        if axis is not None:
            shape[axis] //= count
        room = nn.Parameter(parameter.new_empty(shape))
        if is_sliced and parameter_name.startswith("gate_up") and getattr(module, "is_concatenated", True):
            room.packed_axis = axis  # type: ignore[attr-defined]
        setattr(module, parameter_name, room)
    if is_sliced and rank:
        module.down_proj_bias = None
    module.total_experts = num_experts
    num_own = num_experts if is_sliced else num_experts // count
    module.own_experts = range(num_experts) if is_sliced else range(rank * num_own, (rank + 1) * num_own)
    if is_grouped:
        module.num_experts = num_own
    if hasattr(module, "identity_expert"):  # added by the first rank
        del module.identity_expert
        module.identity_expert = torch.zeros_like if rank else torch.clone


def pack_experts(module: nn.Module) -> None:
    """Leave room in gpt-oss on the meta device for experts' weights as saved; raise ModelError for other models."""
    packed = [child for child in experts_of(module) if child.is_transposed and child.has_bias]
    if not packed:
        raise ModelError(f"mxfp4 is served in gpt-oss, not in {type(module).__name__}")
    for experts in packed:
        for name in ("gate_up_proj", "down_proj"):
            count, inputs, outputs = getattr(experts, name).shape
            delattr(experts, name)
            size = (count, outputs, inputs // _GROUP_SIZE)
            for suffix, shape in (("blocks", (*size, _GROUP_SIZE // 2)), ("scales", size)):
                experts.register_buffer(f"{name}_{suffix}", torch.empty(shape, dtype=torch.uint8, device="meta"))
    group_experts(module)


def unpack(packed: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the [out, in] numbers of an expert's bytes [out, in / 2] and exponents [out, in / 32]."""
    values, byte = torch.tensor(FP4_VALUES, device=packed.device), torch.arange(256, device=packed.device)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], -1)
    numbers = F.embedding(packed.int(), pairs).view(*exponents.shape, _GROUP_SIZE)
    return torch.ldexp(numbers, exponents.int().unsqueeze(-1) - 127).flatten(1).to(dtype)


@torch.library.custom_op("paceline::sort_by_expert", mutates_args=())
def _sort_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of `index` in order of experts, and the end of each expert's pairs."""
    experts, order = index.flatten().sort(stable=True)
    return order, torch.searchsorted(experts, torch.arange(num_experts, device=index.device), right=True)


@_sort_by_expert.register_fake
def _(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return index.new_empty(index.numel()), index.new_empty(num_experts)


@torch.library.custom_op("paceline::grouped_linear", mutates_args=())
def grouped_linear(
    rows: Tensor, order: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return [pairs, out]: each pair's row times its expert's weight, by torch's operators.

    Args:
        rows: [pairs, in], or [tokens, in] with each token's pairs in a row.
        order, ends: see `_sort_by_expert`.
        weight: [experts, out, in] of any strides, or packed [experts, out, in / 2] with `scales`.
        bias: [experts, out].
        scales: [experts, out, in / 32] exponents.
    """
    output = rows.new_empty(len(order), weight.shape[1], dtype=dtype)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start == end:
            continue
        pairs = order[start:end]
        matrix = weight[expert] if scales is None else unpack(weight[expert], scales[expert], rows.dtype)
        product = F.linear(rows[pairs // (len(order) // len(rows))], matrix)
        output[pairs] = product.to(dtype) if bias is None else product.to(dtype) + bias[expert]
        start = end
    return output


@grouped_linear.register_fake
def _(
    rows: Tensor, order: Tensor, _: Tensor, weight: Tensor, _bias: Tensor | None, dtype: torch.dtype,
    _scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return rows.new_empty(len(order), weight.shape[1], dtype=dtype)
