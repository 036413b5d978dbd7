"""Dot-product attention over keys and values that lie side by side, with soft caps and sinks where a model has them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionParams(NamedTuple):
    """How a layer attends.

    Attributes:
        window: length of a sliding window; None for full attention.
        scaling: factor of the dot products; None for 1 / sqrt(head_dim).
        softcap: bound on the scores, `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
        sinks: [heads] a score of each head to which no value belongs (gpt-oss; Xiao et al., arXiv:2309.17453).
        bias: [heads, distances] what is added to a score by the distance between two tokens; longer distances than the
            last are taken for it (T5; Raffel et al., arXiv:1910.10683, section 2.1).
        is_cross: the layer attends to the encoder's tokens, whose keys and values are in the cache already.
    """

    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    is_cross: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this is what torch's own operator computes: a softmax of scaled dot products."""
        return self.softcap is None and self.sinks is None


def attend_to_self(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention within a prompt's first chunk, without the KV cache. [heads, n, d] -> [n, heads, d]."""
    copies = query.shape[0] // key.shape[0]
    if copies > 1:
        key, value = key.repeat_interleave(copies, 0), value.repeat_interleave(copies, 0)
    output = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, scale=scaling)
    return output[0].transpose(0, 1)


def attend_to_gathered(
    rows: int, length: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams
) -> Tensor:
    """Attend to gathered blocks.

    For grouped-query attention, the query heads of one kv head become more queries, so that keys are not copied.

    Args:
        query: [heads, rows * length, d].
        key, value: the rows' blocks in order, [..., kv_heads, d]; values may have a size of their own.
        mask: [rows, 1, copies * length, context], which has the window in it.

    Returns:
        [rows * length, heads, d] of the values' size.
    """
    heads, _, head_dim = query.shape
    kv_heads, value_dim = value.shape[-2:]
    copies = heads // kv_heads
    context = (rows, mask.shape[-1], kv_heads)
    key, value = key.view(*context, head_dim).transpose(1, 2), value.view(*context, value_dim).transpose(1, 2)
    # [kv_heads, copies, rows, length, d] -> [rows, kv_heads, copies * length, d]
    query = query.view(kv_heads, copies, rows, length, head_dim).permute(2, 0, 1, 3, 4)
    query = query.reshape(rows, kv_heads, copies * length, head_dim)
    if params.is_plain:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=params.scaling)
    else:
        sinks = None if params.sinks is None else params.sinks.view(kv_heads, copies).repeat_interleave(length, -1)
        output = _attend(query, key, value, mask, params._replace(sinks=sinks))
    output = output.view(rows, kv_heads, copies, length, value_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(rows * length, heads, value_dim)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Compute what torch's operator does not: scores with a soft cap, and weights that leave a share to a sink.

    Args:
        query, key, value: [rows, kv_heads, n, d].
        params: its sinks are [kv_heads, queries].
    """
    scale = query.shape[-1] ** -0.5 if params.scaling is None else params.scaling
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores + mask
    if params.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = params.sinks.float()[None, :, :, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
