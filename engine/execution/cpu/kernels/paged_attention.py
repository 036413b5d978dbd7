"""Paged attention for compiled passes: a torch operator whose C++ implementation reads keys and values in their blocks.

torch's attention needs contiguous keys and values; gathering them took most of a small model's pass over a batch.
"""

import torch
from torch import Tensor

from engine.execution.attention import attend_to_gathered
from engine.execution.cpu.kernels import library as kernels
from engine.models.layers.layer_attention import AttentionParams

_LANES = 16
"""Floats in a CPU's largest vector register; the C++ works with whole registers."""


def suits(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the operator supports such heads: float32, in whole vector registers."""
    return dtype == torch.float32 and head_dim % _LANES == 0


def attend_to_blocks(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, ends: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attend to keys and values in blocks; return [tokens, heads, head_dim].

    Args:
        query: [tokens, heads, head_dim], of rows of equal length.
        keys, values: [num_blocks, block_size, kv_heads, head_dim].
        blocks: [rows, width] each row's blocks, in order.
        ends: [rows, length] each token attends only to places before its end.
        mask: [rows, 1, length, width * block_size], added to the scaled dot products.
        scaling: factor of the dot products; None for 1 / sqrt(head_dim).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = torch.ops.paceline.paged_attention(query, keys, values, blocks, ends, mask, scale)
    return output


def _gather_and_attend(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, ends: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Compute the same with torch operators; `ends` is not needed, because the mask implies it."""
    rows, _, length, _ = mask.shape
    mask = mask.repeat(1, 1, query.shape[1] // keys.shape[2], 1)
    params = AttentionParams(scaling=scale)
    return attend_to_gathered(rows, length, query.transpose(0, 1), keys[blocks], values[blocks], mask, params)


SCHEMA = (
    "paged_attention"
    "(Tensor query, Tensor keys, Tensor values, Tensor blocks, Tensor ends, Tensor mask, float scale) -> Tensor"
)
kernels.define(SCHEMA, _gather_and_attend, lambda query, *_: query.new_empty(query.shape))
