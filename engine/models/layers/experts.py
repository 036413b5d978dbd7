"""Mixture-of-experts layers: every token's experts by two grouped products, whose bits do not depend on the batch.

transformers calls `compute_experts` in the experts module of every family, if `group_experts` has chosen it. Pairs of a
token and one of its experts are sorted by expert, without the host. A token's results are added in float32, in order of
its experts, and over the ranks of a tensor-parallel model, which hold a slice of every expert. gpt-oss' experts stay
as they are saved, in mxfp4: two 4-bit floats in a byte, and a power of two for each group of 32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.mxfp4 import FP4_VALUES

from engine.errors import ModelError
from engine.models.layers.reducer import Reducer, register, sum_over_ranks

EXPERTS_NAME = "paceline"
_GROUP_SIZE = 32


def experts_of(module: nn.Module) -> list[Any]:
    """Return a model's experts modules whose implementation can be chosen."""
    return [child for child in module.modules() if hasattr(child, "is_transposed")]


def group_experts(module: nn.Module) -> None:
    """Let `compute_experts` compute a model's experts, and those of a head that is wrapped with it."""
    for experts in experts_of(module):
        experts.config._experts_implementation = EXPERTS_NAME


def compute_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of every token's experts, [tokens, hidden].

    Args:
        module: transformers' experts, with the weights of all experts in one tensor.
        index, weights: [tokens, top_k] each token's experts and the factors of their results.
    """
    index, places = index.sort(-1)
    weights = weights.gather(1, places)
    order, ends = torch.ops.paceline.sort_by_expert(index, module.num_experts)

    def product(rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        bias, scales = getattr(module, f"{name}_bias", None), getattr(module, f"{name}_scales", None)
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
    if (key := getattr(module, "reducer_key", None)) is not None:
        total = sum_over_ranks(total, key)
    return total.to(hidden.dtype)


ExpertsInterface.register(EXPERTS_NAME, compute_experts)


def slice_experts(module: Any, name: str, reducer: Reducer) -> None:
    """Leave room in a module on the meta device for one rank's slice of every expert.

    Raises:
        ModelError: the experts cannot be split.
    """
    size = module.down_proj.shape[2]
    if module.has_bias or module.is_transposed or getattr(module, "has_post_expert_norm", False) or not module.has_gate:
        raise ModelError(f"{name} has experts with biases or norms, or without gates, which are not split over ranks")
    if size % reducer.world_size:
        raise ModelError(f"{name} has size {size}, not divisible by tensor_parallel_size {reducer.world_size}")
    experts, outputs, inputs = module.gate_up_proj.shape
    like = {"dtype": module.down_proj.dtype, "device": "meta"}
    module.gate_up_proj = nn.Parameter(torch.empty(experts, outputs // reducer.world_size, inputs, **like))
    module.down_proj = nn.Parameter(torch.empty(experts, inputs, size // reducer.world_size, **like))
    module.reducer_key = register(reducer)


def pack_experts(module: nn.Module) -> None:
    """Leave room in gpt-oss on the meta device for its experts' weights as they are saved.

    Raises:
        ModelError: it has no experts of that kind.
    """
    packed = [child for child in experts_of(module) if child.is_transposed and child.has_bias]
    if not packed:
        raise ModelError(f"mxfp4 is served in gpt-oss, not in {type(module).__name__}")
    for experts in packed:
        for name in ("gate_up_proj", "down_proj"):
            count, inputs, outputs = getattr(experts, name).shape
            delattr(experts, name)
            size = (count, outputs, inputs // _GROUP_SIZE)
            for part, shape in (("blocks", (*size, _GROUP_SIZE // 2)), ("scales", size)):
                experts.register_buffer(f"{name}_{part}", torch.empty(shape, dtype=torch.uint8, device="meta"))
    group_experts(module)


def num_packed_weights(module: nn.Module) -> int:
    """Return how many weights are packed in a module."""
    return sum(2 * buffer.numel() for name, buffer in module.named_buffers() if name.endswith("_blocks"))


def unpack(packed: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the [out, in] numbers of an expert's bytes [out, in / 2] and exponents [out, in / 32]."""
    values, byte = torch.tensor(FP4_VALUES, device=packed.device), torch.arange(256, device=packed.device)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], -1)
    numbers = F.embedding(packed.int(), pairs).view(*exponents.shape, _GROUP_SIZE)
    return torch.ldexp(numbers, exponents.int().unsqueeze(-1) - 127).flatten(1).to(dtype)


@torch.library.custom_op("paceline::sort_by_expert", mutates_args=())
def _sort_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of `index` in order of experts, and the end of every expert's pairs in it."""
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
    """Return [pairs, out]: each pair's row times its expert's weight, in torch's operators.

    Args:
        rows: [pairs, in]; or [tokens, in], whose pairs follow each other.
        order, ends: see `sort_by_expert`.
        weight: [experts, out, in], with any strides; or, with scales, packed numbers [experts, out, in / 2].
        bias: [experts, out], or None.
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
