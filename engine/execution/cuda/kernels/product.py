"""The matrix product of few rows, as a Triton kernel: each result is one ordered sum over the inner dimension."""

import functools

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_INNER_TILE = 128
_MIN_PROGRAMS = 90
"""Programs that fill most of a large GPU's multiprocessors."""


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [n, in] times weight [out, in], [n, out]: rounded once, and once more where a bias is added."""
    count, size = rows.shape
    output = rows.new_empty(count, len(weight))
    rows_tile = 16 if count <= 16 else 64 if count <= 64 else 128
    out_tile = next((tile for tile in (128, 64, 32) if len(weight) // tile >= _MIN_PROGRAMS), 16)
    stage_bytes = (rows_tile + out_tile) * _INNER_TILE * rows.element_size()
    stages = max(2, min(3 if out_tile == 128 else 5, _shared_bytes(rows.device) // stage_bytes))
    num_row_tiles = triton.cdiv(count, rows_tile)
    _multiply_kernel[(num_row_tiles * triton.cdiv(len(weight), out_tile),)](
        rows, weight, rows if bias is None else bias, output, count, len(weight), size, num_row_tiles,
        rows.stride(0), weight.stride(0),
        ROWS_TILE=rows_tile, OUT_TILE=out_tile, INNER_TILE=_INNER_TILE, IS_EVEN=size % _INNER_TILE == 0,
        HAS_BIAS=bias is not None, num_stages=stages, num_warps=8 if rows_tile == 128 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return output


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 17
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


@triton.jit(do_not_specialize=["count", "num_row_tiles"])  # no variants by the number of rows
def _multiply_kernel(
    rows, weight, bias, output, count, num_outputs, size, num_row_tiles, row_stride, weight_stride,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, INNER_TILE: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one tile. Programs with the same weights run at the same time, so that these are read once."""
    row = tl.program_id(0) % num_row_tiles * ROWS_TILE + tl.arange(0, ROWS_TILE)
    column = tl.program_id(0) // num_row_tiles * OUT_TILE + tl.arange(0, OUT_TILE)
    inner = tl.arange(0, INNER_TILE)
    is_row, is_column = row[:, None] < count, column[None, :] < num_outputs
    row_tile = rows + row[:, None].to(tl.int64) * row_stride + inner[None, :]
    weight_tile = weight + column[None, :].to(tl.int64) * weight_stride + inner[:, None]
    sums = tl.zeros((ROWS_TILE, OUT_TILE), tl.float32)
    for start in range(0, size, INNER_TILE):
        if IS_EVEN:
            x = tl.load(row_tile + start, is_row, 0.0)
            w = tl.load(weight_tile + start, is_column, 0.0)
        else:
            x = tl.load(row_tile + start, is_row & (start + inner[None, :] < size), 0.0)
            w = tl.load(weight_tile + start, is_column & (start + inner[:, None] < size), 0.0)
        sums = tl.dot(x, w, sums)
    result = sums.to(output.dtype.element_ty)
    if HAS_BIAS:
        added = tl.load(bias + column, column < num_outputs, 0.0).to(tl.float32)
        result = (result.to(tl.float32) + added[None, :]).to(output.dtype.element_ty)
    tl.store(output + row[:, None].to(tl.int64) * num_outputs + column[None, :], result, is_row & is_column)
