"""Half weights: float32 linear layers that keep 16-bit weights in 16 bits.

Reading weights bounds a decode step. A model saved in 16 bits and served in float32, as on CPUs that multiply 16-bit
numbers no faster, would read twice the bytes that its file has. Nothing is rounded: a layer is packed only if every
weight is a 16-bit number.

The products are C++ of ours. Those of libraries (FBGEMM, oneDNN and inductor's template alike) leave prefetching to the
CPU, and read weights at 60 % of the memory's speed on the Xeon where this was measured. In ours a row's products do not
depend on the rows beside it or on the number of threads; in torch's float32 products they do (MKL: rows in batches of 1
to 3 differ from those of larger ones), and in FBGEMM's on CPUs with AVX2 only.

Packing is worth building the C++ library only for large layers (`has_large_layers`), but once it is loaded every layer
gains: on Zen 5, one thread, layers of 0.25 to 12 M weights take 0.3 to 0.4 of torch's time for one row, and 0.14 to
0.25 for five.
"""

import copy
import weakref
from typing import Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.execution.cpu import kernels

MIN_LARGE = 2**21
"""Weights of a large layer: a model that has one is bound by reading weights, not by calls."""
_PANEL = 64
"""Outputs of a panel, as in half_linear.cpp."""
_GROUP = 32
"""Outputs of a panel that are packed together there."""


class PanelLinear(nn.Module):
    """A float32 linear layer with 16-bit weights, in the order in which `paceline.half_linear` reads them."""

    panels: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)
        padded = F.pad(linear.weight.detach().to(dtype), (0, 0, 0, -self.out_features % _PANEL))
        if dtype == torch.bfloat16:  # in pairs, from the halves of a group
            groups = padded.view(-1, _PANEL // _GROUP, 2, _GROUP // 2, self.in_features).permute(0, 4, 1, 3, 2)
            panels = groups.reshape(-1, self.in_features, _PANEL)
        else:
            panels = padded.view(-1, _PANEL, self.in_features).transpose(1, 2).contiguous()
        self.register_buffer("panels", panels, persistent=False)

    @classmethod
    def pack(cls, linear: nn.Linear) -> Self | None:
        """Return the same layer; None unless its weights are all bfloat16 or all float16 numbers."""
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
    """Compute what the C++ does with torch's own operators, but for the order of sums."""
    if panels.dtype == torch.bfloat16:
        panels = panels.view(*panels.shape[:2], -1, _GROUP // 2, 2).transpose(3, 4).reshape(panels.shape)
    return (rows @ panels.float()).transpose(0, 1).flatten(1)


SCHEMA = "half_linear(Tensor rows, Tensor panels) -> Tensor"
kernels.define(SCHEMA, _multiply_panels, lambda rows, panels: rows.new_empty(rows.shape[0], panels.shape[0] * _PANEL))


def has_large_layers(module: nn.Module) -> bool:
    """Return whether packing a module is worth building the library that computes the products."""
    return any(_can_pack(layer) and layer.weight.numel() >= MIN_LARGE for layer in module.modules())


def pack_layers(module: nn.Module) -> int:
    """Pack every float32 linear layer on the CPU whose weights are 16-bit numbers; return how many layers are packed.

    Load the library first (`packages.load_kernels`): the operator's definition in Python is slow. A layer's float32
    weights are freed once they are packed, unless something else holds them, as an embedding may.
    """
    packed: weakref.WeakKeyDictionary[nn.Module, PanelLinear] = weakref.WeakKeyDictionary()
    # Innermost first, so that the largest layer, usually the head, is packed when others have shrunk.
    for parent in reversed([parent for parent in module.modules() if type(parent) is not nn.Linear]):
        for name, child in list(parent.named_children()):
            if _can_pack(child) and (layer := packed.get(child) or PanelLinear.pack(child)) is not None:
                packed[child] = layer
                setattr(parent, name, layer)
    return sum(isinstance(layer, PanelLinear) for layer in module.modules())


def packed_copy(module: nn.Module) -> nn.Module:
    """Return a packed copy of a module; they share every tensor but the weights that this call packs."""
    tensors = [*module.parameters(), *module.buffers()]
    copied = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    pack_layers(copied)
    return copied


def _can_pack(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
