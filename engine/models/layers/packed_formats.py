"""Packed formats: where published checkpoints keep a quantised weight's numbers, as data, and one reader for all.

A weight is `(integer - zero) * scale`. Integers and zeros in 32-bit words are unsigned; half of their range is
subtracted from both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.layers.quantization import QuantizedLinear, pack_nibbles


class PackedFormat(NamedTuple):
    """How a format stores a layer."""

    weight: str  # the last part of a tensor's name, as the next three
    scales: str
    zeros: str = ""
    groups: str = ""  # has the group of each input
    inputs_first: bool = False  # tensors are [in, out] and not [out, in]
    axes: tuple[int, int] = (1, 0)  # of weight and zeros: where words hold several numbers
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)  # the place in a word of each 4-bit number
    zero: int = 0  # added to stored zeros


FORMATS: Mapping[str, Sequence[PackedFormat]] = {
    "awq": [PackedFormat("qweight", "scales", "qzeros", "", True, (1, 1), (0, 4, 1, 5, 2, 6, 3, 7))],
    "gptq": [PackedFormat("qweight", "scales", "qzeros", "g_idx", True, (0, 1), zero=1)],
    "compressed-tensors": [
        PackedFormat("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        PackedFormat("weight", "weight_scale", "weight_zero_point"),
    ],
    "fp8": [PackedFormat("weight", "weight_scale_inv")],
    "mxfp8": [PackedFormat("weight", "weight_scale_inv")],
}
"""Formats of layers by `quant_method`."""


def unpacked(
    name: str, form: PackedFormat, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> QuantizedLinear | Tensor:
    """Return the layer that a format's tensors make, or its weight in float32 if its groups are irregular.

    On the meta device, it has shapes only. Raises ModelError if weights have unserved bits, or scales do not fit.
    """
    weight, scales, zeros = tensors[form.weight], tensors[form.scales], tensors.get(form.zeros)
    groups, num_bits = tensors.get(form.groups), 8
    if weight.dtype == torch.int32:
        shape = tensors.get("weight_shape")
        count = int(shape[1]) if shape is not None else len(groups) if groups is not None else None
        num_bits = 32 * weight.shape[form.axes[0]] // count if count else int(settings.get("bits") or 4)
        if num_bits not in (4, 8):
            raise ModelError(f"{name} has weights of {num_bits} bits; weights of 4 and 8 bits are served")
        weight = _integers(weight, num_bits, form.axes[0], form.order)
        if zeros is not None and zeros.dtype == torch.int32:
            is_v2 = "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format"))
            zeros = _integers(zeros, num_bits, form.axes[1], form.order, 0 if is_v2 else form.zero)
    if form.inputs_first:
        weight, scales, zeros = weight.mT, scales.mT, None if zeros is None else zeros.mT
    outputs, inputs = weight.shape
    if scales.element_size() == 1:  # powers of two
        scales = scales.view(torch.float8_e8m0fnu).float()
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
    schemes = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    blocks = [settings.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
    rows, size = next((block for block in blocks if block), (1, 0))
    num_groups = scales.shape[1]
    size = min(size, inputs) if size and -(-inputs // size) == num_groups else inputs // num_groups
    if len(scales) < outputs:
        scales = scales.repeat_interleave(outputs if len(scales) == 1 else rows, 0)[:outputs]
    if len(scales) != outputs or not size or -(-inputs // size) != num_groups:
        raise ModelError(f"{name} has scales of the shape {[*scales.shape]}, for weights of {[*weight.shape]}")
    if zeros is not None:
        zeros = zeros.reshape(1, 1) if zeros.numel() == 1 else zeros[:outputs].reshape(-1, num_groups)
        zeros = zeros.to(torch.int8).expand_as(scales).contiguous() if zeros.is_meta or zeros.any() else None
    in_order = torch.arange(inputs, device=weight.device) // size
    is_regular = size * num_groups == inputs and size % (8 // num_bits) == 0
    if groups is not None:  # GPTQ always has them
        is_regular &= (
            not settings.get("desc_act", not form.zero) if groups.is_meta else torch.equal(groups, in_order.to(groups))
        )
    if is_regular:
        values = pack_nibbles(weight) if num_bits == 4 else weight
        return QuantizedLinear(values.contiguous(), scales.contiguous(), None, zeros)
    index = in_order if groups is None else groups.long()
    return (weight.float() - (0 if zeros is None else zeros[:, index])) * scales.float()[:, index]


def _integers(words: Tensor, num_bits: int, axis: int, order: Sequence[int], added: int = 0) -> Tensor:
    """Return the int8 numbers packed in int32 words along an axis, less half of their range."""
    places = [num_bits * place for place in (order if num_bits == 4 else range(4))]
    shifts = torch.tensor(places, device=words.device, dtype=torch.int32)
    numbers = (words.movedim(axis, -1).unsqueeze(-1) >> shifts) + added & (1 << num_bits) - 1
    return (numbers - (1 << num_bits - 1)).to(torch.int8).flatten(-2).movedim(-1, axis)
