"""Quantised weights on CPUs: products that read 8-bit or 4-bit integers from memory.

The operator is our own C++, because torch's and torchao's ways on a CPU write the weights as floats in every pass, or
take only bfloat16. A row's result does not depend on the other rows or on the number of threads.

With 0.4 billion weights (`tests/bench/large_target.py`) on one thread of an AMD CPU with AVX-512, int8 takes 0.51 and
int4 0.32 of the memory of 16-bit weights, 0.7 of the CPU time of a pass over one row, and 0.8 to 1.0 over five.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.execution.cpu import kernels
from engine.models.quantized_linear import QuantizedLinear

_PANEL = 64
"""Outputs per panel, as in panels.h."""


class QuantizedPanelLinear(nn.Module):
    """A linear layer with quantised weights, stored in the order of `paceline.quantized_linear`; sums are float32.

    Attributes:
        panels: [out / 64, in, 64] int8; or, of 4-bit weights, [out / 64, in, 32] uint8, whose byte i has output i in
            its lower half and output i + 32 in the upper.
        scales: [out / 64, groups, 64] float32.
    """

    panels: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("bias", layer.bias, persistent=False)
        panels, scales = _in_panels(layer.integers), _in_panels(layer.scales.float())
        if layer.num_bits == 4:
            lower, upper = panels.view(torch.uint8).chunk(2, -1)
            panels = lower & 15 | upper << 4
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        rows = x.reshape(-1, self.in_features).float()
        products: Tensor = torch.ops.paceline.quantized_linear(rows, self.panels, self.scales)
        products = products[:, : self.out_features]
        if self.bias is not None:
            products = products + self.bias
        return products.to(x.dtype).view(*x.shape[:-1], self.out_features)


def _in_panels(matrix: Tensor) -> Tensor:
    """Return [out / 64, columns, 64] of a matrix [out, columns], padded with zeros."""
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % _PANEL))
    return padded.view(-1, _PANEL, matrix.shape[1]).transpose(1, 2).contiguous()


def _multiply_panels(rows: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    """Compute the same as the C++ with torch operators, up to the order of sums."""
    if panels.dtype == torch.uint8:
        panels = torch.cat([(panels << 4).view(torch.int8) >> 4, panels.view(torch.int8) >> 4], -1)
    weights = panels.float() * scales.repeat_interleave(panels.shape[1] // scales.shape[1], 1)
    return (rows @ weights).transpose(0, 1).flatten(1)


SCHEMA = "quantized_linear(Tensor rows, Tensor panels, Tensor scales) -> Tensor"
kernels.define(
    SCHEMA, _multiply_panels, lambda rows, panels, scales: rows.new_empty(rows.shape[0], panels.shape[0] * _PANEL)
)
