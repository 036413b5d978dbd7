"""Linear layers whose rows round alike in every batch: our product for few rows, cuBLAS for many.

With few rows, cuBLAS splits the inner dimension over several blocks, so it rounds differently than for many rows. Our
kernel never splits: each result is one ordered sum over the inner dimension, whatever the rows and tiles. For many
rows cuBLAS is faster, and is used if it gives the same bits.
"""

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.execution.cuda.kernels import product
from engine.models.quantization import QuantizedLinear
from engine.models.shards import RowLinear

MAX_KERNEL_ROWS = 64
"""Rows up to which the kernel is used."""
_CHECKED_ROWS = (80, 160, 320, 512, 640, 1024)

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


class InvariantRowLinear(RowLinear):
    """A rank's slice of such a layer's inputs; see `RowLinear`."""

    def __init__(self, linear: RowLinear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.reducer_key = linear.weight, linear.bias, linear.reducer_key
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight
        self._uses_cublas = cublas_agrees(weight.shape, weight.dtype, weight.device, torch.float32)

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum, [..., out] float32."""
        operands = (x, self.weight, None, self._uses_cublas, torch.float32)
        output: Tensor = torch.ops.paceline.invariant_linear(*operands)
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
            elif type(child) is RowLinear:
                setattr(parent, name, InvariantRowLinear(child))
            elif type(child) is QuantizedLinear:
                setattr(parent, name, InvariantQuantizedLinear(child, dtype))


@functools.cache
@torch.inference_mode()
def cublas_agrees(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, out_dtype: torch.dtype | None = None
) -> bool:
    """Return whether cuBLAS gives the kernel's bits for many rows and weights of a shape."""
    weight = torch.randn(shape, dtype=dtype, device=device)
    rows = torch.randn(_CHECKED_ROWS[-1], shape[1], dtype=dtype, device=device)
    expected = product.multiply(rows, weight, None, out_dtype=out_dtype)
    agrees = all(torch.equal(_cublas(rows[:count], weight, out_dtype), expected[:count]) for count in _CHECKED_ROWS)
    logger.info("weights of %s x %s: cuBLAS rounds %s our kernel", *shape, "like" if agrees else "unlike")
    return agrees


@torch.library.custom_op("paceline::invariant_linear", mutates_args=())
def _invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, uses_cublas: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if uses_cublas and len(rows) > MAX_KERNEL_ROWS:
        output = _cublas(rows, weight, out_dtype)
        output = output if bias is None else output + bias
    else:
        output = product.multiply(rows, weight, bias, out_dtype=out_dtype)
    return output.view(*x.shape[:-1], len(weight))


@_invariant_linear.register_fake
def _(
    x: Tensor, weight: Tensor, _bias: Tensor | None, _uses_cublas: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight), dtype=out_dtype)


def _cublas(rows: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return F.linear(rows, weight) if out_dtype is None else torch.mm(rows, weight.T, out_dtype=out_dtype)
