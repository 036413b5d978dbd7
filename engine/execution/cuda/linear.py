"""Linear layers whose rows round alike in every batch: our product for few rows, cuBLAS for many.

With few rows, cuBLAS splits the inner dimension over several blocks, so it rounds differently than for many rows. Our
kernel computes each result as one ordered sum, whatever the rows and tiles. For many rows, the faster cuBLAS is used if
it gives the same bits, or for a draft, which cannot change a text.
"""

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.execution.cuda.kernels import grouped_product, product
from engine.models.layers.experts import experts_of, group_experts, grouped_linear
from engine.models.layers.quantization import QuantizedLinear

MAX_KERNEL_ROWS = 64
"""Rows up to which the kernel is used."""
_CHECKED_ROWS = (1, 16, 17, 64, 65, 80, 160, 320, 512, 640, 1024, 2048, 4096, 8192)
_MAX_CHECKED_NUMBERS = 2**28

logger = logging.getLogger(__name__)


class InvariantLinear(nn.Linear):
    """A linear layer with 16-bit weights [out, in]."""

    uses_cublas: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        output: Tensor = torch.ops.paceline.invariant_linear(x, self.weight, self.bias, None, self.uses_cublas)
        return output


class InvariantQuantizedLinear(QuantizedLinear):
    """A linear layer with quantised weights, which the kernel reads unconverted for any number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        options = (self.scales, False, self.zeros)
        output: Tensor = torch.ops.paceline.invariant_linear(x, self.values, self.bias, *options)
        return output


_INVARIANT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: InvariantLinear,
    QuantizedLinear: InvariantQuantizedLinear,
}


def sum_in_order() -> None:
    """Make cuBLAS sum 16-bit products in float32 and without splits, in this process."""
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the other library cannot be told not to split
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def make_invariant(module: nn.Module, dtype: torch.dtype, *, invariant: bool = True) -> None:
    """Make every linear layer of a 16-bit model invariant; without `invariant`, cuBLAS may round differently."""
    if dtype == torch.float32:
        return
    if invariant:
        sum_in_order()
    for layer in module.modules():
        if (invariant_class := _INVARIANT.get(type(layer))) is None:
            continue
        layer.__class__ = invariant_class  # in place: models may share a layer
        if isinstance(layer, InvariantLinear):
            weight = layer.weight
            layer.uses_cublas = not invariant or cublas_agrees(weight.shape, weight.dtype, weight.device)
    if experts := experts_of(module):
        group_experts(module)
        for block in list(module.modules()):
            if any(child in experts for child in block.children()):
                _wrap_router(block)


def _wrap_router(block: nn.Module) -> None:
    """Let our product compute a router, which calls `F.linear` with its weight instead of being a linear layer."""
    for child in block.children():
        weight = child._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(child, nn.Linear):
            child.weight = RouterWeight(weight.data, requires_grad=False)


class RouterWeight(nn.Parameter):
    """A weight [experts, in] of a router, whose `F.linear` is our product."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.linear:
            return super().__torch_function__(function, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            rows, weight, bias = (*args, None)[:3]
            return torch.ops.paceline.invariant_linear(rows, weight, bias, None, False)


grouped_linear.register_kernel("cuda")(grouped_product.multiply)


@functools.cache
@torch.inference_mode()
def cublas_agrees(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuBLAS gives the kernel's bits for many rows and weights of a shape."""
    counts = [count for count in _CHECKED_ROWS if count * max(shape) <= _MAX_CHECKED_NUMBERS]
    weight = torch.randn(shape, dtype=dtype, device=device)
    rows = torch.randn(counts[-1], shape[1], dtype=dtype, device=device)
    expected = product.multiply(rows, weight, None)
    many = [n for n in counts if n > MAX_KERNEL_ROWS]
    agrees = all(torch.equal(_cublas(rows[:n], weight), expected[:n]) for n in many)
    logger.info("weights of %s x %s: cuBLAS rounds %s our kernel", *shape, "like" if agrees else "unlike")
    unlike = [n for n in counts if not torch.equal(product.multiply(rows[:n], weight, None), expected[:n])]
    if unlike:
        logger.warning("weights of %s x %s: our kernel rounds unlike itself for %s rows", *shape, unlike)
    return agrees


@torch.library.custom_op("paceline::invariant_linear", mutates_args=())
def _invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    uses_cublas: bool,
    zeros: Tensor | None = None,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if uses_cublas and len(rows) > MAX_KERNEL_ROWS:
        output = _cublas(rows, weight)
        output = output if bias is None else output + bias
    else:
        output = product.multiply(rows, weight, bias, scales=scales, zeros=zeros)
    return output.view(*x.shape[:-1], len(weight))


@_invariant_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    _bias: Tensor | None,
    _scales: Tensor | None,
    _uses_cublas: bool,
    _zeros: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _cublas(rows: Tensor, weight: Tensor) -> Tensor:
    return F.linear(rows, weight)
