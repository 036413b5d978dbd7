"""Half weights: linear layers computed in float32 whose weights are read as the 16-bit numbers that they are.

A decode step is bound by reading weights. A model that was saved in 16 bits and is served in float32, as on CPUs that
are no faster in 16 bits, would read twice the bytes it has. FBGEMM multiplies float32 rows by float16 weights, widening
them on the way; threads share a product by its columns. Nothing is rounded: a layer is only taken if a power of two
makes every weight a float16 number. And a row's products do not depend on the rows beside it, which rounding in a batch
usually does.
"""

import copy
import warnings
import weakref

import torch
from torch import Tensor, nn

from engine import kernels

_EXPONENT = 15
"""Weights are scaled until the largest is below 2**15: the largest float16 is 65504, the smallest 2**-24."""
MIN_LARGE = 2**21
"""Weights of a layer from which on it gains also where passes are not compiled; smaller ones are bound by calls."""


class HalfLinear(nn.Module):
    """A float32 linear layer with packed float16 weights."""

    scale: Tensor
    bias: Tensor | None

    def __init__(self, scaled: Tensor, exponent: int, bias: Tensor | None) -> None:
        """Pack weights.

        Args:
            scaled: [out, in] the weights times 2**exponent, float32 that are float16 numbers.
            bias: [out], not scaled.
        """
        super().__init__()
        self.out_features, self.in_features = scaled.shape
        self._pack(scaled)
        self.register_buffer("scale", torch.ldexp(torch.tensor(1.0), torch.tensor(-exponent)), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        products = self._multiply(x.reshape(-1, x.shape[-1])) * self.scale
        if self.bias is not None:
            products = products + self.bias
        return products.view(*x.shape[:-1], self.out_features)

    def _pack(self, scaled: Tensor) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)

    def _multiply(self, rows: Tensor) -> Tensor:
        products: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)
        return products


class TracedHalfLinear(HalfLinear):
    """One for packages, which can be given a tensor that stands for packed weights, but not an object."""

    packed: Tensor

    def _pack(self, scaled: Tensor) -> None:
        packed: Tensor = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(scaled)
        self.register_buffer("packed", packed, persistent=False)

    def _multiply(self, rows: Tensor) -> Tensor:
        products: Tensor = torch.ops.paceline.half_linear(rows, self.packed, self.out_features)
        return products


def _multiply_alone(rows: Tensor, packed: Tensor, out_features: int) -> Tensor:
    """Compute the same with torch's own operator: in one thread."""
    nothing = torch.zeros(out_features)
    products: Tensor = torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(rows, packed, nothing, out_features)
    return products


SCHEMA = "half_linear(Tensor rows, Tensor packed, int out_features) -> Tensor"
kernels.define(SCHEMA, _multiply_alone, lambda rows, _, out_features: rows.new_empty(rows.shape[0], out_features))


def with_half_weights(module: nn.Module) -> nn.Module:
    """Return a module that shares all tensors with `module`, with half weights wherever that changes no product."""
    tensors = [*module.parameters(), *module.buffers()]
    shared = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    use_half_weights(shared, TracedHalfLinear)
    return shared


def use_half_weights(module: nn.Module, kind: type[HalfLinear] = HalfLinear, *, smallest: int = 0) -> None:
    """Give a module half weights wherever that changes no product, in layers of `smallest` weights or more.

    A layer's own weights are let go once they are packed, unless something else holds them, as an embedding may.
    """
    if not is_available():
        return
    halves: weakref.WeakKeyDictionary[nn.Module, HalfLinear] = weakref.WeakKeyDictionary()
    # From the innermost, so that the largest layer, which is the head's as a rule, comes when others have shrunk.
    for parent in reversed([part for part in module.modules() if type(part) is not nn.Linear]):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.numel() < smallest:
                continue
            if (half := halves.get(child) or _half(child, kind)) is not None:
                halves[child] = half
                setattr(parent, name, half)


def _half(linear: nn.Linear, kind: type[HalfLinear]) -> HalfLinear | None:
    """Return the same layer with half weights; None if that would round them."""
    weight = linear.weight.detach()
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    exponent = _EXPONENT - int(torch.frexp(torch.maximum(-weight.amin(), weight.amax())).exponent)
    scaled = torch.ldexp(weight, torch.tensor(exponent))
    if not torch.equal(scaled.half().float(), scaled):
        return None
    return kind(scaled, exponent, None if linear.bias is None else linear.bias.detach())


def is_available() -> bool:
    """Return whether this torch has the products; have it say once, unheard, that it would rather have objects."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            one = torch.ones(1, 1)
            torch.fbgemm_linear_fp16_weight_fp32_activation(one, torch.fbgemm_pack_gemm_matrix_fp16(one), None)
            kinds = [kind(one, 0, None) for kind in (HalfLinear, TracedHalfLinear)]
            return all(bool(half(one) == 1) for half in kinds)
        except (AttributeError, RuntimeError):
            return False
