"""Attention over long contexts against float64: more chunks than programs share, for chains, trees and a window."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from engine.execution.batch import ForwardRow, build
from engine.execution.cuda.kernels import triton_attention
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.layer_attention import AttentionParams, KVShape
from tests.gpu.kernels import by_torch, dtype_of
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
            for name, value in {"CHUNK": 16, "TILE": 16, "NUM_PARTS": 2}.items():
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
                right, torchs = (by_torch(group, query, kv, dtype, params) for dtype in (torch.float64, like.dtype))
                yield {
                    "cell": f"{name} of 5 tokens at {length}, {num_rows} rows",
                    "error": float((output.double() - right).abs().max()),
                    "error_of_torch": float((torchs - right).abs().max()),
                }
