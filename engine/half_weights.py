"""Half weights: linear layers computed in float32 whose weights are read as the 16-bit numbers that they are.

A decode step is bound by reading weights. A model that was saved in 16 bits and is served in float32, as on CPUs that
are no faster in 16 bits, would read twice the bytes it has. FBGEMM multiplies float32 rows by float16 weights, widening
them on the way; in one thread for small layers, in all for those that take longer to read than waking the others takes.
Nothing is rounded: a layer is only taken if a power of two makes every weight a float16 number. And a row's products do
not depend on the rows beside it, which rounding in a batch usually does.
"""

import copy
import itertools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

_EXPONENT = 15
"""Weights are scaled until the largest is below 2**15: the largest float16 is 65504, the smallest 2**-24."""
MIN_SHARED = 2**21
"""Weights of a layer from which on threads share its product; below, what starting them costs is not won back."""


class HalfLinear(nn.Module):
    """A float32 linear layer with packed float16 weights; one thread computes it."""

    packed: Tensor
    offset: Tensor
    scale: Tensor

    def __init__(self, scaled: Tensor, exponent: int, bias: Tensor | None) -> None:
        """Pack weights.

        Args:
            scaled: [out, in] the weights times 2**exponent, float32 that are float16 numbers.
            bias: [out], not scaled.
        """
        super().__init__()
        self.out_features, self.in_features = scaled.shape
        offset = torch.zeros(self.out_features) if bias is None else torch.ldexp(bias, torch.tensor(exponent))
        self.register_buffer("packed", self._pack(scaled), persistent=False)
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("scale", torch.ldexp(torch.tensor(1.0), torch.tensor(-exponent)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        products = self._multiply(x.reshape(-1, x.shape[-1]))
        return (products * self.scale).view(*x.shape[:-1], self.out_features)

    def _pack(self, scaled: Tensor) -> Tensor:
        """Return what stands for the weights in a package."""
        # A handle, which AOTInductor passes on; the newer way to pack returns an object, which it cannot.
        packed: Tensor = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(scaled)
        return packed

    def _multiply(self, rows: Tensor) -> Tensor:
        products: Tensor = torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(
            rows, self.packed, self.offset, self.out_features
        )
        return products


class SharedHalfLinear(HalfLinear):
    """One with so many weights that threads share its product, each some columns: the same sums, bit for bit."""

    def _pack(self, scaled: Tensor) -> Tensor:
        number = next(_numbers)
        _shared[number] = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        weakref.finalize(self, _shared.pop, number)
        return torch.tensor(number)

    def _multiply(self, rows: Tensor) -> Tensor:
        products: Tensor = torch.ops.paceline.shared_half_linear(rows, self.packed, self.out_features)
        return products + self.offset


_numbers = itertools.count()
_shared: dict[int, Any] = {}
"""Packed weights by number: a package can hold the number, but not the object."""


def _multiply_shared(rows: Tensor, packed: Tensor, _: int) -> Tensor:
    products: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, _shared[int(packed)])
    return products


def _shape_of_shared(rows: Tensor, _: Tensor, out_features: int) -> Tensor:
    return rows.new_empty(rows.shape[0], out_features)


_library = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]
_library.define("shared_half_linear(Tensor rows, Tensor packed, int out_features) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("shared_half_linear", _multiply_shared, "CPU")  # type: ignore[no-untyped-call]
_library.impl("shared_half_linear", _shape_of_shared, "Meta")  # type: ignore[no-untyped-call]


def with_half_weights(module: nn.Module) -> nn.Module:
    """Return a module that shares all tensors with `module`, with half weights wherever that changes no product."""
    tensors = [*module.parameters(), *module.buffers()]
    shared = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    use_half_weights(shared)
    return shared


def use_half_weights(module: nn.Module, *, smallest: int = 0) -> None:
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
            if (half := halves.get(child) or _half(child)) is not None:
                halves[child] = half
                setattr(parent, name, half)


def _half(linear: nn.Linear) -> HalfLinear | None:
    """Return the same layer with half weights; None if that would round them."""
    weight = linear.weight.detach()
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    exponent = _EXPONENT - int(torch.frexp(torch.maximum(-weight.amin(), weight.amax())).exponent)
    scaled = torch.ldexp(weight, torch.tensor(exponent))
    if not torch.equal(scaled.half().float(), scaled):
        return None
    kind = SharedHalfLinear if weight.numel() >= MIN_SHARED else HalfLinear
    return kind(scaled, exponent, None if linear.bias is None else linear.bias.detach())


def is_available() -> bool:
    """Return whether this torch has the products; have it say once, unheard, that it would rather have objects."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(1, 1))
            return bool(torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 1), packed, None) == 1)
        except (AttributeError, RuntimeError):
            return False
