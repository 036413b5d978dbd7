"""PanelLinear: linear layers on CPUs that read 16-bit, 8-bit or 4-bit weights from memory.

Decoding is bound by reading weights. CPUs without fast 16-bit arithmetic compute in float32, where a model saved in 16
bits would take twice the bytes of its file. Packing is exact: it takes only quantised weights and 16-bit numbers.

Why not a library: FBGEMM, oneDNN and Inductor's template read weights at 60 % of a Xeon's memory bandwidth, without
prefetching; torch's and torchao's products of integers write float weights in every pass, or take only bfloat16. And in
MKL and FBGEMM, a row's result depends on the other rows.

Only large layers justify building the library (`pack_large_model`); once it is loaded, every layer is packed. On one
thread of Zen 5, 16-bit layers take 0.3 to 0.4 of torch's time for one row, and 0.14 to 0.25 for five rows.
"""

import copy
import logging
import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.execution.cpu.kernels import library as kernels
from engine.models.layers.quantization import QuantizedLinear

logger = logging.getLogger(__name__)

MIN_LARGE = 2**21
"""Number of weights of a large layer; models with large layers are bound by memory bandwidth."""
_PANEL = 64
"""Outputs per panel, as in panel_linear.cpp."""
_GROUP = 32
"""Outputs per group within a panel of bfloat16 numbers."""


class PanelLinear(nn.Module):
    """A linear layer whose weights are stored in the order of `paceline.panel_linear`; sums are float32.

    Attributes:
        panels: [out / 64, in, 64] bfloat16, float16 or int8. Of bfloat16 numbers, outputs i and i + 16 of each 32 are
            neighbours. 4-bit weights are [out / 64, in, 32] uint8: byte i has output i in its lower half, i + 32 above.
        scales: [out / 64, groups, 64] float32, or 128 with zeros after the scales; a single 1 for 16-bit numbers.
    """

    panels: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear | QuantizedLinear, panels: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach(), persistent=False)
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @classmethod
    def pack(cls, layer: nn.Module) -> Self | None:
        """Return the packed layer; None unless its weights are quantised, or all 16-bit numbers of one format."""
        if not _can_pack(layer):
            return None
        if isinstance(layer, QuantizedLinear):
            panels, scales = _in_panels(layer.integers), _in_panels(layer.scales.float())
            if layer.zeros is not None:
                scales = torch.cat([scales, _in_panels(layer.zeros.float())], -1)
            if layer.num_bits == 4:
                lower, upper = panels.view(torch.uint8).chunk(2, -1)
                panels = lower & 15 | upper << 4
            return cls(layer, panels, scales)
        assert isinstance(layer, nn.Linear)
        for dtype in (torch.bfloat16, torch.float16):
            halves = layer.weight.detach().to(dtype)
            if torch.equal(halves.float(), layer.weight):
                return cls(layer, _panels_of(halves), torch.ones(1, 1, 1))
        return None

    def refill(self, weight: Tensor) -> None:
        """Replace the weights of a layer of 16-bit numbers in place, by `weight` [out, in] rounded to these."""
        self.panels.copy_(_panels_of(weight.to(self.panels.dtype)))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        rows = x.reshape(-1, self.in_features).float()
        products: Tensor = torch.ops.paceline.panel_linear(rows, self.panels, self.scales)
        products = products[:, : self.out_features]
        if self.bias is not None:
            products = products + self.bias
        return products.to(x.dtype).view(*x.shape[:-1], self.out_features)


def _in_panels(matrix: Tensor) -> Tensor:
    """Return [out / 64, columns, 64] of a matrix [out, columns], padded with zeros."""
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % _PANEL))
    return padded.view(-1, _PANEL, matrix.shape[1]).transpose(1, 2).contiguous()


def _panels_of(halves: Tensor) -> Tensor:
    """Return the panels of a matrix [out, in] of 16-bit numbers."""
    panels = _in_panels(halves)
    if halves.dtype == torch.bfloat16:
        panels = panels.view(*panels.shape[:2], -1, 2, _GROUP // 2).transpose(3, 4).reshape(panels.shape)
    return panels


def _multiply_panels(rows: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    """Compute the same as the C++ with torch operators, up to the order of sums."""
    if panels.dtype == torch.bfloat16:
        panels = panels.view(*panels.shape[:2], -1, _GROUP // 2, 2).transpose(3, 4).reshape(panels.shape)
    elif panels.dtype == torch.uint8:
        panels = torch.cat([(panels << 4).view(torch.int8) >> 4, panels.view(torch.int8) >> 4], -1)
    factors = scales.repeat_interleave(panels.shape[1] // scales.shape[1], 1)
    numbers = panels.float() - factors[..., _PANEL:] if scales.shape[2] > _PANEL else panels.float()
    weights = numbers * factors[..., :_PANEL]
    return (rows @ weights).transpose(0, 1).flatten(1)


SCHEMA = "panel_linear(Tensor rows, Tensor panels, Tensor scales) -> Tensor"
kernels.define(
    SCHEMA, _multiply_panels, lambda rows, panels, _: rows.new_empty(rows.shape[0], panels.shape[0] * _PANEL)
)


def pack_large_model(module: nn.Module, name: str, load_library: Callable[[], None]) -> None:
    """Load the C++ library and pack a module's layers, if a layer is large enough to build the library for it."""
    layers: list[Any] = [layer for layer in module.modules() if _can_pack(layer)]
    if any(layer.in_features * layer.out_features >= MIN_LARGE for layer in layers):
        load_library()
        num_packed = pack_layers(module)
        num_whole = sum(type(layer) is nn.Linear for layer in module.modules())
        logger.info("%s: %d linear layers have 16-bit or quantised weights, %d do not", name, num_packed, num_whole)


def pack_layers(module: nn.Module) -> int:
    """Pack quantised and exact 16-bit layers on the CPU, and return their number; load the library first.

    Packing frees a layer's float32 weights, unless they are tied to an embedding.
    """
    packed: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
    # Innermost first, so that the output layer, usually the largest, is packed when other layers have freed memory.
    for parent in reversed([parent for parent in module.modules() if type(parent) is not nn.Linear]):
        for name, child in list(parent.named_children()):
            if (layer := packed.get(child) or PanelLinear.pack(child)) is not None:
                packed[child] = layer
                setattr(parent, name, layer)
    return sum(isinstance(layer, PanelLinear) for layer in module.modules())


def packed_copy(module: nn.Module) -> nn.Module:
    """Return a packed copy of a module; all tensors but the packed weights are shared."""
    tensors = [*module.parameters(), *module.buffers()]
    copied = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    pack_layers(copied)
    return copied


def _can_pack(layer: nn.Module) -> bool:
    if type(layer) is QuantizedLinear:
        return layer.values.device.type == "cpu" and not layer.values.is_floating_point()
    return type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
