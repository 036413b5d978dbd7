"""Paged attention of compiled passes: an operator for torch, and the C++ that computes it where passes run compiled.

torch's own attention wants a row's keys and values in one piece. In a small model's pass over a batch, gathering them
and attending to them took most of the time; the C++ beside this file reads them where they lie.
"""

import torch
from torch import Tensor

from engine.execution.attention import attend_to_gathered
from engine.execution.cpu import kernels

_LANES = 16
"""Numbers that a CPU's registers hold, at most: it works with whole ones."""


def suits(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the operator computes such heads; it is written for one number format."""
    return dtype == torch.float32 and head_dim % _LANES == 0


def attend_to_blocks(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, ends: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attend to keys and values in blocks.

    Args:
        query: [tokens, heads, head_dim], tokens of rows of the same length.
        keys, values: [num_blocks, block_size, kv_heads, head_dim].
        blocks: [rows, width] each row's blocks, in order.
        ends: [rows, length] the place behind the last that each token sees, or a later one.
        mask: [rows, 1, length, width * block_size], added to the products.
        scaling: what products are multiplied by; None is one over the root of head_dim.

    Returns:
        [tokens, heads, head_dim].
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = torch.ops.paceline.paged_attention(query, keys, values, blocks, ends, mask, scale)
    return output


def _gather_and_attend(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, ends: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Compute the same with torch's own operators; what `ends` tells, the mask does too."""
    rows, _, length, _ = mask.shape
    mask = mask.repeat(1, 1, query.shape[1] // keys.shape[2], 1)
    return attend_to_gathered(rows, length, query.transpose(0, 1), keys[blocks], values[blocks], mask, scale)


SCHEMA = (
    "paged_attention"
    "(Tensor query, Tensor keys, Tensor values, Tensor blocks, Tensor ends, Tensor mask, float scale) -> Tensor"
)
kernels.define(SCHEMA, _gather_and_attend, lambda query, *_: query.new_empty(query.shape))
