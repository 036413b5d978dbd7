"""QuantizedLinear: a linear layer whose weights are 8-bit or 4-bit integers with scales.

It holds plain tensors, so that layers can be fused, compiled and packed like any other; the classes of the library that
chose the numbers are gone once a model is loaded. This forward computes what torchao does, with torch operators only,
and writes the weights as floats in every pass: the memory is saved, but no time. `engine/execution/cpu` has a product
that reads the integers.
"""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """A linear layer with the weights `values * scales`, without zero points.

    Attributes:
        values: [out, in] int8; or, of 4-bit weights, [out, in / 2] uint8, as `pack_nibbles` makes them.
        scales: [out, groups] of equally many inputs each, in the model's number format or float32.
        bias: [out], or None.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.out_features = len(values)
        self.in_features = values.shape[1] * (2 if values.dtype == torch.uint8 else 1)

    @classmethod
    def concatenated(cls, layers: Sequence["QuantizedLinear"]) -> Self:
        """Return one layer with the outputs of several that have the same inputs and format."""
        biases = [layer.bias for layer in layers if layer.bias is not None]
        values, scales = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("values", "scales"))
        return cls(values, scales, torch.cat(biases) if biases else None)

    @property
    def num_bits(self) -> int:
        """Bits of a weight."""
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def integers(self) -> Tensor:
        """[out, in] int8."""
        return unpack_nibbles(self.values) if self.values.dtype == torch.uint8 else self.values

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        integers, scales = self.integers.to(x.dtype), self.scales.to(x.dtype)
        if scales.shape[1] == 1:
            product = self.multiply(x, integers) * scales.flatten()
        else:
            weight = integers.view(len(integers), scales.shape[1], -1) * scales.unsqueeze(-1)
            product = self.multiply(x, weight.flatten(1))
        return product if self.bias is None else product + self.bias

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in] and weights [out, in] of the same number format."""
        return F.linear(x, weight)


def pack_nibbles(integers: Tensor) -> Tensor:
    """Pack [out, in] int8 numbers from -8 to 7 to [out, in / 2] uint8: of two inputs, the first is the lower half."""
    halves = integers.view(torch.uint8)
    return halves[:, ::2] & 15 | halves[:, 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the [out, in] int8 numbers that were packed."""
    return torch.stack([(packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4], -1).flatten(1)
