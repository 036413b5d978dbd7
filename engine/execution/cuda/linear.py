"""Linear layers whose rows round alike in every batch: our product for few rows, cuBLAS for many.

With few rows, cuBLAS splits the inner dimension over several blocks, so it rounds differently than for many rows. Our
kernel never splits: each result is one ordered sum over the inner dimension, whatever the rows and tiles. For many
rows cuBLAS is faster, and is used if it gives the same bits.
"""

import functools
import hashlib
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn

from engine.execution.cuda.kernels import product
from engine.execution.scratch import cache_folder
from engine.models.quantization import QuantizedLinear

MAX_KERNEL_ROWS = 64
"""Rows up to which the kernel is used."""
_CHECKED_ROWS = (1, 16, 17, 64, 65, 80, 160, 320, 512, 640, 1024, 2048, 4096, 8192)
_MAX_CHECKED_NUMBERS = 2**28

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
    """Return whether cuBLAS gives the kernel's bits for many rows and weights of a shape; answers are on disk."""
    key = [torch.__version__, triton.__version__, shape, dtype, Path(product.__file__).read_text()]
    if device.type == "cuda":
        key += [torch.cuda.get_device_name(device), torch._C._cuda_getDriverVersion()]  # type: ignore[attr-defined]
    path = cache_folder() / f"cublas-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}"
    if path.exists():
        return path.read_text() == "True"
    counts = [count for count in _CHECKED_ROWS if count * max(shape) <= _MAX_CHECKED_NUMBERS]
    weight = torch.randn(shape, dtype=dtype, device=device)
    rows = torch.randn(counts[-1], shape[1], dtype=dtype, device=device)
    expected = product.multiply(rows, weight, None)
    many = [n for n in counts if n > MAX_KERNEL_ROWS]
    agrees = all(torch.equal(F.linear(rows[:n], weight), expected[:n]) for n in many)
    logger.info("weights of %s x %s: cuBLAS rounds %s our kernel", *shape, "like" if agrees else "unlike")
    unlike = [n for n in counts if not torch.equal(product.multiply(rows[:n], weight, None), expected[:n])]
    if unlike:
        logger.warning("weights of %s x %s: our kernel rounds unlike itself for %s rows", *shape, unlike)
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(agrees))
        except OSError as error:
            logger.warning("the next start compares our kernel with cuBLAS again: %s", error)
    return agrees


@torch.library.custom_op("paceline::invariant_linear", mutates_args=())
def _invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, uses_cublas: bool) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if uses_cublas and len(rows) > MAX_KERNEL_ROWS:
        output = F.linear(rows, weight)
        output = output if bias is None else output + bias
    else:
        output = product.multiply(rows, weight, bias)
    return output.view(*x.shape[:-1], len(weight))


@_invariant_linear.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None, _uses_cublas: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
