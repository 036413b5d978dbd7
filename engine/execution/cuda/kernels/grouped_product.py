"""The product of rows and their experts' weights, as a Triton kernel: one ordered sum for each result, as in `product`.

There are enough programs for any choice of experts, so that the host need not wait for the router's choice.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.execution.cuda.kernels.product import load_weights

_OUT_TILE = 64


def multiply(
    rows: Tensor, order: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return [pairs, out]; see `grouped_linear`."""
    pairs, num_outputs = len(order), weight.shape[1]
    output = rows.new_empty(pairs, num_outputs, dtype=dtype)
    rows_tile = 16 if pairs <= 16 * len(weight) else 64
    max_tiles = min(len(weight), pairs) + pairs // rows_tile
    _grouped_kernel[(max_tiles, triton.cdiv(num_outputs, _OUT_TILE))](
        rows, order, ends, weight, rows if scales is None else scales, rows if bias is None else bias, output,
        len(weight), num_outputs, rows.shape[1], pairs // len(rows), rows.stride(0), *weight.stride(),
        EXPERTS_PAD=triton.next_power_of_2(len(weight)), ROWS_TILE=rows_tile, OUT_TILE=_OUT_TILE,
        INNER_TILE=64 if scales is None else 128, IS_PACKED=scales is not None, HAS_BIAS=bias is not None,
        num_stages=4, enable_fp_fusion=False,
    )  # fmt: skip
    return output


@triton.jit
def _grouped_kernel(
    rows, order, ends, weight, scales, bias, output, num_experts, num_outputs, size, pairs_of_row,
    row_stride, expert_stride, column_stride, inner_stride,
    EXPERTS_PAD: tl.constexpr, ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, INNER_TILE: tl.constexpr,
    IS_PACKED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one expert; nothing if there are fewer tiles."""
    lane = tl.arange(0, EXPERTS_PAD)
    is_expert = lane < num_experts
    end = tl.load(ends + lane, is_expert, 0)
    start = tl.load(ends + lane - 1, is_expert & (lane > 0), 0)
    tiles = tl.where(is_expert, tl.cdiv(end - start, ROWS_TILE), 0)
    before = tl.cumsum(tiles, 0) - tiles
    tile = tl.program_id(0)
    is_own = (before <= tile) & (tile < before + tiles)
    stop = tl.sum(tl.where(is_own, end, 0), 0)
    place = tl.sum(tl.where(is_own, start + (tile - before) * ROWS_TILE, 0), 0) + tl.arange(0, ROWS_TILE)
    expert = tl.sum(tl.where(is_own, lane, 0), 0)
    is_row = place < stop
    pair = tl.load(order + place, is_row, 0)
    column = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    is_column = column < num_outputs
    inner = tl.arange(0, INNER_TILE)
    row_tile = rows + (pair // pairs_of_row)[:, None] * row_stride + inner[None, :]
    weight += expert.to(tl.int64) * expert_stride
    scales += expert.to(tl.int64) * num_outputs * (size // 32) if IS_PACKED else 0
    weight_tile = weight + column[None, :] * column_stride
    sums = tl.zeros((ROWS_TILE, OUT_TILE), tl.float32)
    last = tl.where(stop > 0, size, 0)  # a program without an expert reads nothing
    for first in range(0, last, INNER_TILE):
        is_inner = first + inner < size
        x = tl.load(row_tile + first, is_row[:, None] & is_inner[None, :], 0.0)
        if IS_PACKED:
            w = load_weights(
                weight, scales, column, num_outputs, first, column_stride, size, x.dtype,
                INNER_TILE, False, "mxfp4", 32, 32,
            )  # fmt: skip
        else:
            is_weight = is_inner[:, None] & is_column[None, :]
            w = tl.load(weight_tile + (first + inner)[:, None] * inner_stride, is_weight, 0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    if HAS_BIAS:
        added = tl.load(bias + expert * num_outputs + column, is_column, 0.0)
        sums = sums.to(output.dtype.element_ty).to(tl.float32) + added.to(tl.float32)[None, :]
    place = pair[:, None] * num_outputs + column[None, :]
    tl.store(output + place, sums.to(output.dtype.element_ty), is_row[:, None] & is_column[None, :])
