"""Fused projections: q/k/v and gate/up of each layer as one matrix product.

transformers calls the projections in turn on the same input. The first computes all and stores them on the input
tensor, where the others read them; threads can therefore share a module. Unfused layers cost 5-15 % of decoding, and a
compiler cannot fuse them, because it cannot concatenate parameters.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.models.layers.quantization import QuantizedLinear

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear(nn.Module):
    """The first projection of a group: computes all of them in one product."""

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.linear = linear
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        """Return the first projection of `x`, and store all of them on `x` for the siblings."""
        projections = self.project(x)
        x.fused = (self, projections)  # type: ignore[attr-defined]
        return projections[0]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        projections: tuple[Tensor, ...] = self.linear(x).split(self.sizes, dim=-1)
        return projections


class FusedSibling(nn.Module):
    """A later projection of a group."""

    def __init__(self, first: FusedLinear, index: int) -> None:
        super().__init__()
        self._first = [first]  # in a list, so that torch does not register the layer twice
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """Return this projection of `x`, as stored on `x`, or computed anew if another group has stored over it."""
        (first,) = self._first
        layer, projections = getattr(x, "fused", (None, ()))
        return projections[self._index] if layer is first else first.project(x)[self._index]


def fuse_projections(module: nn.Module) -> None:
    """Fuse the linear layers that attention and MLP blocks of transformers call on the same input."""
    for block in list(module.modules()):
        for names in _GROUPS:
            layers = [getattr(block, name, None) for name in names]
            if (linear := _concatenated(layers)) is None:
                continue
            first = FusedLinear(linear, [layer.out_features for layer in layers if layer])
            setattr(block, names[0], first)
            for index, name in enumerate(names[1:], start=1):
                setattr(block, name, FusedSibling(first, index))


def _concatenated(layers: list[Any]) -> nn.Module | None:
    if len({getattr(layer, "bias", None) is None for layer in layers}) > 1:
        return None
    if all(type(layer) is QuantizedLinear for layer in layers):
        formats = {(layer.values.dtype, layer.scales.shape[1], layer.zeros is None) for layer in layers}
        return QuantizedLinear.concatenated(layers) if len(formats) == 1 else None
    if not all(type(layer) is nn.Linear for layer in layers):
        return None
    weight = torch.cat([layer.weight for layer in layers])
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=layers[0].bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if layers[0].bias is not None:
        linear.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return linear
