"""Mixture-of-experts layers: every token's experts by two grouped products, whose bits do not depend on the batch.

transformers calls `compute_experts` in every family's experts module, if `group_experts` has chosen it. Pairs of a
token and an expert are sorted by expert, on the device. A token's results are added in float32, in order of its
experts. gpt-oss' experts stay as saved, in mxfp4: two 4-bit floats a byte, and a power of two for each group of 32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.mxfp4 import FP4_VALUES

from engine.errors import ModelError

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
    """Return the weighted sum of every token's experts, [tokens, hidden].

    module: transformers' experts; index, weights: [tokens, top_k] each token's experts and factors.
    """
    index, places = index.sort(-1)
    weights = weights.gather(1, places)
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
    return total.to(hidden.dtype)


ExpertsInterface.register(EXPERTS_NAME, compute_experts)


def pack_experts(module: nn.Module) -> None:
    """Replace the weights of a meta gpt-oss's experts by buffers for mxfp4; raise ModelError for other models."""
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
