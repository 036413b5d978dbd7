"""Paged attention of compiled passes: an operator for torch, and the C++ that computes it where passes run compiled.

torch's own attention wants a row's keys and values in one piece. In a small model's pass over a batch, gathering them
and attending to them took most of the time; the C++ beside this file reads them where they lie.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

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
    return attend(rows, length, query.transpose(0, 1), keys[blocks], values[blocks], mask, scale)


def attend(
    rows: int, length: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attention over gathered blocks.

    Args:
        query: [heads, rows * length, d].
        key, value: the rows' blocks one after the other, [..., kv_heads, d].
        mask: [rows, 1, copies * length, context].
    """
    heads, _, head_dim = query.shape
    kv_heads = key.shape[-2]
    copies = heads // kv_heads
    context = (rows, mask.shape[-1], kv_heads, head_dim)
    key, value = key.view(context).transpose(1, 2), value.view(context).transpose(1, 2)
    # The query heads of one kv head become more queries: grouped-query attention without copying keys.
    # [kv_heads, copies, rows, length, d] -> [rows, kv_heads, copies * length, d]
    query = query.view(kv_heads, copies, rows, length, head_dim).permute(2, 0, 1, 3, 4)
    query = query.reshape(rows, kv_heads, copies * length, head_dim)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    output = output.view(rows, kv_heads, copies, length, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(rows * length, heads, head_dim)


SCHEMA = (
    "paged_attention"
    "(Tensor query, Tensor keys, Tensor values, Tensor blocks, Tensor ends, Tensor mask, float scale) -> Tensor"
)
kernels.define(SCHEMA, _gather_and_attend, lambda query, *_: query.new_empty(query.shape))
