"""Attention over long contexts against float64: more chunks than programs share, for chains, trees and a window."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from engine.execution.attention import Group, KVTensors, additive_mask, attend_to_gathered
from engine.execution.batch import ForwardRow, build
from engine.execution.cuda.kernels import triton_attention
from engine.models.layer_attention import AttentionParams, KVShape
from tests.gpu.kernels import dtype_of
from tests.gpu.passes import BLOCK_SIZE

LENGTHS = (8_193, 20_000, 131_072)
FORMS: dict[str, tuple[list[int] | None, int | None]] = {
    "chain": (None, None),
    "tree": ([-1, -1, 0, 2], None),
    "window": (None, 4096),
}
"""The parents of a row's draft of four tokens, and the window."""


def long_contexts(device: str, *, dry: bool) -> Iterator[dict[str, Any]]:
    """Yield the largest error of each form and length, and that of torch's attention in the cache's format."""
    num_rows, heads, kv_heads, dim = (2, 2, 1, 16) if dry else (4, 32, 8, 128)
    with ExitStack() as patches:
        if dry:
            for name, value in {"CHUNK": 16, "TILE": 16, "MAX_PROGRAMS": 2}.items():
                patches.enter_context(patch.object(triton_attention, name, value))
        for length in (70,) if dry else LENGTHS:
            width = -(-(length + 5) // BLOCK_SIZE)
            like = torch.empty(0, dtype=dtype_of(device), device=device)
            kv = KVTensors(KVShape(1, kv_heads, dim, dim), 1 + num_rows * width, BLOCK_SIZE, like)
            for cache in (*kv.keys, *kv.values):
                cache.normal_()
            query = torch.randn(heads, num_rows * 5, dim, dtype=like.dtype, device=device)
            for name, (parents, window) in FORMS.items():
                params = AttentionParams(window and min(window, length // 2))
                rows = [  # of almost the same length, and each with blocks of its own
                    ForwardRow([1] * 5, length - row, range(1 + row * width, 1 + (row + 1) * width), 5, parents)
                    for row in range(num_rows)
                ]
                (group,) = build(rows, kv).paged.groups
                output = query.new_empty(num_rows * 5, heads, dim)
                triton_attention.attend(group, query, kv.keys[0], kv.values[0], output, params)
                right = _by_torch(group, query, kv, params, torch.float64)
                torchs = _by_torch(group, query, kv, params, like.dtype)
                yield {
                    "cell": f"{name} of 5 tokens at {length}, {num_rows} rows",
                    "error": float((output.double() - right).abs().max()),
                    "error_of_torch": float((torchs - right).abs().max()),
                }


def _by_torch(
    group: Group, query: torch.Tensor, kv: KVTensors, params: AttentionParams, dtype: torch.dtype
) -> torch.Tensor:
    """Return [tokens, heads, dim] in float64, computed row by row in a number format."""
    outputs, copies = [], query.shape[0] // kv.keys[0].shape[2]
    for row in range(group.rows):
        one = slice(row, row + 1)
        extra = None if group.extra is None else group.extra[one]
        context = group.blocks.shape[1] * BLOCK_SIZE
        mask = additive_mask(context, group.positions[one], group.limits[one], extra, params.window, dtype)
        queries = query[:, row * group.length : (row + 1) * group.length].to(dtype)
        keys, values = (cache[0][group.blocks[one]].to(dtype) for cache in (kv.keys, kv.values))
        mask = mask.repeat(1, 1, copies, 1)
        outputs.append(attend_to_gathered(1, group.length, queries, keys, values, mask, params).double())
    return torch.cat(outputs)
