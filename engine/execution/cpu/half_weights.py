"""Half weights: linear layers computed in float32 whose weights are read as the 16-bit numbers that they are.

A decode step is bound by reading weights. A model that was saved in 16 bits and is served in float32, as on CPUs that
are no faster in 16 bits, would read twice the bytes it has. Nothing is rounded: a layer is only taken if all it holds
are numbers of 16 bits.

The products of `PanelLinear` are C++ of ours: those of libraries (FBGEMM, oneDNN and inductor's template alike) leave
fetching ahead to the CPU, and on the Xeon where this was measured read weights at 60 % of the speed of memory. Where
ours cannot be built FBGEMM multiplies. With either, a row's products do not depend on the rows beside it, which
rounding in a batch usually does, and threads share a product by its columns.
"""

import copy
import weakref
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.execution.cpu import kernels

MIN_LARGE = 2**21
"""Weights of a layer from which on it gains also where passes are not compiled; smaller ones are bound by calls."""
_PANEL = 64
"""Outputs of a panel, as in half_linear.cpp."""
_GROUP = 32
"""Outputs of a panel that are packed together there."""
_EXPONENT = 15
"""FBGEMM's weights are scaled until the largest is below 2**15: the largest float16 is 65504, the smallest 2**-24."""


class HalfLinear(nn.Module):
    """A float32 linear layer with 16-bit weights."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        products = self.multiply(x.reshape(-1, self.in_features))
        if self.bias is not None:
            products = products + self.bias
        return products.view(*x.shape[:-1], self.out_features)

    @classmethod
    def take(cls, linear: nn.Linear) -> Self | None:
        """Return the same layer; None if that would round its weights."""
        raise NotImplementedError

    def multiply(self, rows: Tensor) -> Tensor:
        """Return [n, out] products of [n, in] rows, without the bias."""
        raise NotImplementedError


class PanelLinear(HalfLinear):
    """One whose weights lie in the order in which `paceline.half_linear` reads them."""

    panels: Tensor

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(linear)
        whole = F.pad(linear.weight.detach().to(dtype), (0, 0, 0, -self.out_features % _PANEL))
        if dtype == torch.bfloat16:  # in pairs, from the halves of a group
            groups = whole.view(-1, _PANEL // _GROUP, 2, _GROUP // 2, self.in_features).permute(0, 4, 1, 3, 2)
            panels = groups.reshape(-1, self.in_features, _PANEL)
        else:
            panels = whole.view(-1, _PANEL, self.in_features).transpose(1, 2).contiguous()
        self.register_buffer("panels", panels, persistent=False)

    @classmethod
    def take(cls, linear: nn.Linear) -> Self | None:
        """Return the same layer; None unless its weights are all bfloat16 or all float16 numbers."""
        weight = linear.weight.detach()
        dtypes = (torch.bfloat16, torch.float16)
        return next((cls(linear, dtype) for dtype in dtypes if torch.equal(weight.to(dtype).float(), weight)), None)

    def multiply(self, rows: Tensor) -> Tensor:
        """Return [n, out] products of [n, in] rows, without the bias."""
        products: Tensor = torch.ops.paceline.half_linear(rows, self.panels)
        return products[:, : self.out_features]


def _multiply_panels(rows: Tensor, panels: Tensor) -> Tensor:
    """Compute what the C++ does with torch's own operators, but for the order of sums."""
    if panels.dtype == torch.bfloat16:
        panels = panels.view(*panels.shape[:2], -1, _GROUP // 2, 2).transpose(3, 4).reshape(panels.shape)
    return (rows @ panels.float()).transpose(0, 1).flatten(1)


SCHEMA = "half_linear(Tensor rows, Tensor panels) -> Tensor"
kernels.define(SCHEMA, _multiply_panels, lambda rows, panels: rows.new_empty(rows.shape[0], panels.shape[0] * _PANEL))


class FbgemmLinear(HalfLinear):
    """One whose weights are float16 numbers times a power of two, for FBGEMM."""

    def __init__(self, linear: nn.Linear, scaled: Tensor, exponent: int) -> None:
        """Pack weights.

        Args:
            scaled: [out, in] the weights times 2**exponent, float32 that are float16 numbers.
        """
        super().__init__(linear)
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        self._scale = 2.0**-exponent

    @classmethod
    def take(cls, linear: nn.Linear) -> Self | None:
        """Return the same layer; None unless a power of two makes all weights float16 numbers."""
        weight = linear.weight.detach()
        exponent = _EXPONENT - int(torch.frexp(torch.maximum(-weight.amin(), weight.amax())).exponent)
        exponent = min(exponent, 126)  # a float32 number is to be the factor
        scaled = torch.ldexp(weight, torch.tensor(exponent))
        return cls(linear, scaled, exponent) if torch.equal(scaled.half().float(), scaled) else None

    def multiply(self, rows: Tensor) -> Tensor:
        """Return [n, out] products of [n, in] rows, without the bias."""
        products: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)
        return products * self._scale


def with_half_weights(module: nn.Module) -> nn.Module:
    """Return a module that shares all tensors with `module`, with half weights wherever that changes no product."""
    shared = shared_copy(module)
    use_half_weights(shared, PanelLinear)
    return shared


def shared_copy(module: nn.Module) -> nn.Module:
    """Return a module that shares all tensors with `module`, and nothing else."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def use_half_weights(module: nn.Module, kind: type[HalfLinear], *, smallest: int = 0) -> None:
    """Give a module half weights wherever that changes no product, in layers of `smallest` weights or more.

    A layer's own weights are let go once they are packed, unless something else holds them, as an embedding may.
    """
    halves: weakref.WeakKeyDictionary[nn.Module, HalfLinear] = weakref.WeakKeyDictionary()
    # From the innermost, so that the largest layer, which is the head's as a rule, comes when others have shrunk.
    for parent in reversed([part for part in module.modules() if type(part) is not nn.Linear]):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.numel() < smallest:
                continue
            if child.weight.dtype != torch.float32 or child.weight.device.type != "cpu":
                continue
            if (half := halves.get(child) or kind.take(child)) is not None:
                halves[child] = half
                setattr(parent, name, half)


def has_fbgemm() -> bool:
    """Return whether this torch has FBGEMM's products."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    one = nn.Linear(1, 1, bias=False)
    nn.init.ones_(one.weight)
    try:
        half = FbgemmLinear.take(one)
        return half is not None and bool(half(torch.ones(1, 1)) == 1)
    except (AttributeError, RuntimeError):
        return False
