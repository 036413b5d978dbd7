"""Half weights: float32 linear layers whose 16-bit weights stay 16-bit.

Decoding is bound by reading weights. CPUs without fast 16-bit arithmetic compute in float32, and a model saved in 16
bits would take twice the bytes of its file. Packing is exact: only layers whose weights are all 16-bit numbers are
packed.

The products are our own C++, for two reasons. Libraries (FBGEMM, oneDNN, inductor's template) do not prefetch, and read
weights at 60 % of memory bandwidth on the Xeon where this was measured. And here a row's result does not depend on the
other rows or on the number of threads; it does in MKL (batches of 1 to 3 rows differ from larger ones), and in FBGEMM
on CPUs with AVX2 only.

Only models with large layers justify building the library (`has_large_layers`). Once it is loaded, every layer is
packed: on one thread of Zen 5, layers of 0.25 to 12 M weights take 0.3 to 0.4 of torch's time for one row, and 0.14 to
0.25 for five rows.
"""

import copy
import weakref
from typing import Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.execution.cpu import kernels
from engine.execution.cpu.quantized_weights import QuantizedPanelLinear
from engine.models.quantized_linear import QuantizedLinear

MIN_LARGE = 2**21
"""Number of weights of a large layer; models with large layers are bound by memory bandwidth."""
_PANEL = 64
"""Outputs per panel, as in panels.h."""
_GROUP = 32
"""Outputs per group within a panel, as in panels.h."""


class PanelLinear(nn.Module):
    """A float32 linear layer with 16-bit weights, stored in the order of `paceline.half_linear`."""

    panels: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)
        padded = F.pad(linear.weight.detach().to(dtype), (0, 0, 0, -self.out_features % _PANEL))
        if dtype == torch.bfloat16:  # output i of a group's first half is stored beside output i of its second half
            groups = padded.view(-1, _PANEL // _GROUP, 2, _GROUP // 2, self.in_features).permute(0, 4, 1, 3, 2)
            panels = groups.reshape(-1, self.in_features, _PANEL)
        else:
            panels = padded.view(-1, _PANEL, self.in_features).transpose(1, 2).contiguous()
        self.register_buffer("panels", panels, persistent=False)

    @classmethod
    def pack(cls, linear: nn.Linear) -> Self | None:
        """Return the packed layer; None unless all weights are exact bfloat16 or all exact float16 numbers."""
        weight = linear.weight.detach()
        dtypes = (torch.bfloat16, torch.float16)
        return next((cls(linear, dtype) for dtype in dtypes if torch.equal(weight.to(dtype).float(), weight)), None)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        products: Tensor = torch.ops.paceline.half_linear(x.reshape(-1, self.in_features), self.panels)
        products = products[:, : self.out_features]
        if self.bias is not None:
            products = products + self.bias
        return products.view(*x.shape[:-1], self.out_features)


def _multiply_panels(rows: Tensor, panels: Tensor) -> Tensor:
    """Compute the same as the C++ with torch operators, up to the order of sums."""
    if panels.dtype == torch.bfloat16:
        panels = panels.view(*panels.shape[:2], -1, _GROUP // 2, 2).transpose(3, 4).reshape(panels.shape)
    return (rows @ panels.float()).transpose(0, 1).flatten(1)


SCHEMA = "half_linear(Tensor rows, Tensor panels) -> Tensor"
kernels.define(SCHEMA, _multiply_panels, lambda rows, panels: rows.new_empty(rows.shape[0], panels.shape[0] * _PANEL))


def has_large_layers(module: nn.Module) -> bool:
    """Return whether a module is large enough to build the C++ library for it."""
    layers = (layer for layer in module.modules() if _can_pack(layer) or _is_quantized(layer))
    return any(layer.in_features * layer.out_features >= MIN_LARGE for layer in layers)


def pack_layers(module: nn.Module) -> int:
    """Pack quantised layers and every float32 linear layer on the CPU whose weights are 16-bit numbers.

    Returns the number of packed layers.

    Load the library first (`packages.load_kernels`), because the operator's Python definition is slow. Packing frees a
    layer's float32 weights, unless they are tied to an embedding.
    """
    packed: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
    # Innermost first, so that the head, usually the largest layer, is packed after the others have freed memory.
    for parent in reversed([parent for parent in module.modules() if type(parent) is not nn.Linear]):
        for name, child in list(parent.named_children()):
            if (layer := packed.get(child) or _pack(child)) is not None:
                packed[child] = layer
                setattr(parent, name, layer)
    return sum(isinstance(layer, PanelLinear | QuantizedPanelLinear) for layer in module.modules())


def packed_copy(module: nn.Module) -> nn.Module:
    """Return a packed copy of a module; all tensors but the packed weights are shared."""
    tensors = [*module.parameters(), *module.buffers()]
    copied = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    pack_layers(copied)
    return copied


def _pack(layer: nn.Module) -> nn.Module | None:
    if _is_quantized(layer):
        return QuantizedPanelLinear(layer)
    return PanelLinear.pack(layer) if _can_pack(layer) else None


def _is_quantized(layer: nn.Module) -> TypeGuard[QuantizedLinear]:
    return type(layer) is QuantizedLinear and layer.values.device.type == "cpu"


def _can_pack(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
