"""The matrix product of few rows, as a Triton kernel: each result is one ordered sum over the inner dimension.

Quantised weights become 16-bit numbers in registers, so that only their own bits are read from memory. The bits of a
result do not depend on the number of rows.
"""

import functools
import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_INNER_TILE = 128
_MIN_PROGRAMS = 90
"""Programs that fill most of a large GPU's multiprocessors."""


def multiply(
    rows: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None,
    scales: Tensor | None = None, zeros: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return rows [n, in] times weight [out, in], [n, out]: rounded once, and again if a bias is added.

    Args:
        weight: numbers of the rows' format; or, with scales, int8, float8_e4m3fn or [out, in / 2] uint8 as
            `pack_nibbles` makes them.
        scales: [out, groups] factors of weights, for groups of equally many inputs.
        zeros: [out, groups] int8, subtracted from weights first.
    """
    count, size = rows.shape
    num_outputs, num_groups = len(weight), 0 if scales is None else scales.shape[1]
    constants = product_constants(count, num_outputs, size, weight.dtype, num_groups, zeros is not None)
    output = torch.empty(count, num_outputs, dtype=out_dtype or rows.dtype, device=rows.device)
    stages = num_stages(constants, rows.element_size(), _shared_bytes(rows.device))
    num_row_tiles = triton.cdiv(count, constants["ROWS_TILE"])
    if weight.dtype == torch.float8_e4m3fn:
        weight = weight.view(torch.uint8)  # not every GPU that we serve on has the format
    _multiply_kernel[(num_row_tiles * triton.cdiv(num_outputs, constants["OUT_TILE"]),)](
        rows, weight, rows if scales is None else scales, rows if bias is None else bias, output,
        count, num_outputs, size, num_row_tiles, rows.stride(0), weight.stride(0), HAS_BIAS=bias is not None,
        zeros=zeros, num_stages=stages, num_warps=num_warps(constants), enable_fp_fusion=False, **constants,
    )  # fmt: skip
    return output


def product_constants(
    count: int, num_outputs: int, size: int, weight_dtype: torch.dtype, num_groups: int, has_zeros: bool = False
) -> dict[str, int | str]:
    """Return the tiles and other constants of the product of `count` rows."""
    # Wide tiles of quantised weights need more registers than there are.
    tiles = (tile for tile in (128, 64, 32)[num_groups > 0 :] if num_outputs // tile >= _MIN_PROGRAMS)
    group = size // num_groups if num_groups > 1 or has_zeros else 0
    formats = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}
    return {
        "ROWS_TILE": 16 if count <= 16 else 64 if count <= 64 else 128,
        "OUT_TILE": next(tiles, 16),
        "INNER_TILE": _INNER_TILE,
        "IS_EVEN": size % _INNER_TILE == 0,
        "FORMAT": formats[weight_dtype] if num_groups else "",
        "GROUP": group,
        "SPAN": math.gcd(group, _INNER_TILE),
        "HAS_SCALES": num_groups == 1 and not has_zeros,
    }


def num_stages(constants: dict[str, int | str], item_bytes: int, shared_bytes: int) -> int:
    """Return how many tiles are loaded ahead, at most as many as shared memory holds."""
    stage_bytes = (int(constants["ROWS_TILE"]) + int(constants["OUT_TILE"])) * _INNER_TILE * item_bytes
    return max(2, min(3 if constants["OUT_TILE"] == 128 else 5, shared_bytes // stage_bytes))


def num_warps(constants: dict[str, int | str]) -> int:
    """Return the warps of a program."""
    return 8 if constants["ROWS_TILE"] == 128 else 4


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 17
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


@triton.jit
def widened(bits, dtype: tl.constexpr):
    """Convert the bits of float8_e4m3fn through float16, whose exponent bias is higher by 8."""
    wide = bits.to(tl.int16)
    return ((((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True) * 256.0).to(dtype)


@triton.jit
def small_floats(nibbles):
    """Convert 4-bit floats e2m1 to float32 through float16, whose exponent bias is higher by 14."""
    wide = nibbles.to(tl.int16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def powers_of_two(exponents):
    """Convert 8-bit exponents e8m0 to float32."""
    wide = exponents.to(tl.int32)
    return tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_weights(
    weight, scales, column, num_outputs, place, weight_stride, size, dtype: tl.constexpr,
    INNER_TILE: tl.constexpr, IS_EVEN: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    zeros=None,
):  # fmt: skip
    """Return the weights [INNER_TILE, outputs] from input `place` on, in the rows' number format."""
    inner = place + tl.arange(0, INNER_TILE)
    if FORMAT == "":
        is_weight = column[None, :] < num_outputs
        if not IS_EVEN:
            is_weight = is_weight & (inner[:, None] < size)
        return tl.load(weight + column[None, :].to(tl.int64) * weight_stride + inner[:, None], is_weight, 0.0)
    start = weight + column[:, None].to(tl.int64) * weight_stride
    is_output = column[:, None] < num_outputs
    if FORMAT == "int4" or FORMAT == "mxfp4":
        half = place // 2 + tl.arange(0, INNER_TILE // 2)[None, :]
        pairs = tl.load(start + half, is_output & (half < size // 2), 0)
        if FORMAT == "int4":
            pairs = pairs.to(tl.int8, bitcast=True)
            tile = tl.interleave((pairs << 4) >> 4, pairs >> 4).to(dtype)
        else:
            tile = tl.interleave(small_floats(pairs & 15), small_floats(pairs >> 4))
    else:
        tile = tl.load(start + inner[None, :], is_output & (inner[None, :] < size), 0)
        tile = widened(tile, dtype) if FORMAT == "fp8" else tile.to(dtype)
    if GROUP > 0:
        NUM_SPANS: tl.constexpr = INNER_TILE // SPAN
        first = place + tl.arange(0, NUM_SPANS)[None, :] * SPAN
        scale = tl.load(scales + column[:, None] * (size // GROUP) + first // GROUP, is_output & (first < size), 0.0)
        if FORMAT == "mxfp4":
            scale = powers_of_two(scale)
        parts = tl.reshape(tile, (tile.shape[0], NUM_SPANS, SPAN))
        if zeros is not None:
            zero = tl.load(zeros + column[:, None] * (size // GROUP) + first // GROUP, is_output & (first < size), 0)
            parts -= zero.to(tile.dtype)[:, :, None]
        parts *= scale.to(tile.dtype)[:, :, None]
        tile = tl.reshape(parts, (tile.shape[0], INNER_TILE)).to(dtype)
    return tl.trans(tile)


@triton.jit(do_not_specialize=["count", "num_row_tiles"])  # no variants by the number of rows
def _multiply_kernel(
    rows, weight, scales, bias, output, count, num_outputs, size, num_row_tiles, row_stride, weight_stride,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, INNER_TILE: tl.constexpr, IS_EVEN: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, zeros=None,
):  # fmt: skip
    """Compute one tile. Programs with the same weights run at the same time, so that weights are read once."""
    row = tl.program_id(0) % num_row_tiles * ROWS_TILE + tl.arange(0, ROWS_TILE)
    column = tl.program_id(0) // num_row_tiles * OUT_TILE + tl.arange(0, OUT_TILE)
    inner = tl.arange(0, INNER_TILE)
    is_row, is_column = row[:, None] < count, column[None, :] < num_outputs
    row_tile = rows + row[:, None].to(tl.int64) * row_stride + inner[None, :]
    sums = tl.zeros((ROWS_TILE, OUT_TILE), tl.float32)
    for start in range(0, tl.cdiv(size, INNER_TILE) * INNER_TILE, INNER_TILE):
        is_x = is_row if IS_EVEN else is_row & (start + inner[None, :] < size)
        x = tl.load(row_tile + start, is_x, 0.0)
        w = load_weights(
            weight, scales, column, num_outputs, start, weight_stride, size, x.dtype,
            INNER_TILE, IS_EVEN, FORMAT, GROUP, SPAN, zeros,
        )  # fmt: skip
        sums = tl.dot(x, w, sums, input_precision="ieee")
    if HAS_SCALES:
        sums = sums * tl.load(scales + column, column < num_outputs, 0.0).to(tl.float32)[None, :]
    result = sums.to(output.dtype.element_ty)
    if HAS_BIAS:
        added = tl.load(bias + column, column < num_outputs, 0.0).to(tl.float32)
        result = (result.to(tl.float32) + added[None, :]).to(output.dtype.element_ty)
    tl.store(output + row[:, None].to(tl.int64) * num_outputs + column[None, :], result, is_row & is_column)
