"""Linear layers whose rows round alike in every batch: a Triton product for few rows, cuBLAS for many.

With few rows, cuBLAS splits the inner dimension over several blocks, so it rounds differently than for many rows. The
kernel here never splits: each result is one ordered sum over the inner dimension, whatever the rows and tiles. For many
rows cuBLAS is faster, and is used if it gives the same bits.
"""

import functools
import logging

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor, nn

from engine.models.quantization import QuantizedLinear

MAX_KERNEL_ROWS = 64
"""Rows up to which the kernel is used."""
_CHECKED_ROWS = (80, 160, 320, 512, 640, 1024)
_INNER_TILE = 128
_MIN_PROGRAMS = 90
"""Programs that fill most of a large GPU's multiprocessors."""

logger = logging.getLogger(__name__)


class InvariantLinear(nn.Module):
    """A linear layer with 16-bit weights [out, in]; see above."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.out_features = linear.out_features
        self._uses_cublas = cublas_agrees(linear.weight.shape, linear.weight.dtype, linear.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        output: Tensor = torch.ops.paceline.invariant_linear(x, self.weight, self.bias, self._uses_cublas)
        return output


class InvariantQuantizedLinear(QuantizedLinear):
    """A linear layer with quantised weights, which become 16-bit numbers in every pass; see above."""

    def __init__(self, layer: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__(layer.values, layer.scales, layer.bias)
        shape = torch.Size((layer.out_features, layer.in_features))
        self._uses_cublas = cublas_agrees(shape, dtype, layer.values.device)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product; see `QuantizedLinear.multiply`."""
        product: Tensor = torch.ops.paceline.invariant_linear(x, weight, None, self._uses_cublas)
        return product


def sum_in_order() -> None:
    """Make cuBLAS sum 16-bit products in float32 and without splits, in this process."""
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the other library cannot be told not to split
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def make_invariant(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace every linear layer of a model in a 16-bit number format."""
    sum_in_order()
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, InvariantLinear(child))
            elif type(child) is QuantizedLinear:
                setattr(parent, name, InvariantQuantizedLinear(child, dtype))


@functools.cache
@torch.inference_mode()
def cublas_agrees(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuBLAS gives the kernel's bits for many rows and weights of a shape."""
    weight = torch.randn(shape, dtype=dtype, device=device)
    rows = torch.randn(_CHECKED_ROWS[-1], shape[1], dtype=dtype, device=device)
    expected = multiply(rows, weight, None)
    agrees = all(torch.equal(F.linear(rows[:count], weight), expected[:count]) for count in _CHECKED_ROWS)
    logger.info("weights of %s x %s: cuBLAS rounds %s our kernel", *shape, "like" if agrees else "unlike")
    return agrees


@torch.library.custom_op("paceline::invariant_linear", mutates_args=())
def _invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, uses_cublas: bool) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if uses_cublas and len(rows) > MAX_KERNEL_ROWS:
        product = F.linear(rows, weight)
        output = product if bias is None else product + bias
    else:
        output = multiply(rows, weight, bias)
    return output.view(*x.shape[:-1], len(weight))


@_invariant_linear.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None, _uses_cublas: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


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


@triton.jit
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
