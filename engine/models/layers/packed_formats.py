"""Packed formats: where published checkpoints keep the numbers of a quantised weight, as data, and one reader of all.

A weight is `(integer - zero) * scale`. Integers in words of 32 bits, and their zeros, have no sign there; here, half of
their range is subtracted from both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.errors import ModelError

PACKED_DTYPES = (torch.int32, torch.int8, torch.float8_e4m3fn)


class PackedFormat(NamedTuple):
    """How a format stores a layer.

    Attributes:
        weight, scales, zeros, groups: the last parts of the tensors' names; `groups` has the group of every input.
        inputs_first: whether tensors are [in, out] and not [out, in].
        axes: those of the weight and the zeros that words hold several numbers of.
        order: the place in a word of each of its numbers.
        zero: what is added to stored zeros.
    """

    weight: str
    scales: str
    zeros: str = ""
    groups: str = ""
    inputs_first: bool = False
    axes: tuple[int, int] = (1, 0)
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    zero: int = 0

    @property
    def kinds(self) -> set[str]:
        """The last parts of the names of a layer's tensors."""
        return {*self[:4], "weight_shape", "bias"}


_AWQ = PackedFormat("qweight", "scales", "qzeros", "", True, (1, 1), (0, 4, 1, 5, 2, 6, 3, 7))
_GPTQ = PackedFormat("qweight", "scales", "qzeros", "g_idx", True, (0, 1), zero=1)
_BLOCKS = PackedFormat("weight", "weight_scale_inv")
FORMATS: Mapping[str, Sequence[PackedFormat]] = {
    "awq": (_AWQ,),
    "gptq": (_GPTQ,),
    "compressed-tensors": (
        PackedFormat("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        PackedFormat("weight", "weight_scale", "weight_zero_point"),
    ),
    "fp8": (_BLOCKS,),
    "mxfp8": (_BLOCKS,),
}
"""The formats of layers, by the name that `quant_method` has in a configuration."""

_SERVED: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "awq": {"bits": (4,), "version": ("gemm", "GEMM"), "format": ("gemm",)},
    "gptq": {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2")},
    "compressed-tensors": {"transform_config": ({},)},
}
"""The values of settings that are served; others change the tensors."""


class PackedWeight(NamedTuple):
    """A weight's numbers.

    Attributes:
        integers: [out, in] int8 or float8_e4m3fn, of `num_bits`.
        scales, zeros: [out, groups]; zeros are int8, or None.
        groups: [in] the group of every input; None if each has equally many that follow each other.
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor | None
    num_bits: int

    def floats(self) -> Tensor:
        """Return the [out, in] weight in float32."""
        num_inputs, groups = self.integers.shape[1], self.groups
        if groups is None:
            groups = torch.arange(num_inputs, device=self.integers.device) // (num_inputs // self.scales.shape[1])
        integers = self.integers.float()
        return (integers if self.zeros is None else integers - self.zeros[:, groups]) * self.scales.float()[:, groups]


def check_settings(path: str, settings: Mapping[str, Any]) -> None:
    """Raise ModelError if a format's settings give it tensors that are not served."""
    for field, served in _SERVED.get(name := settings["quant_method"], {}).items():
        if (value := settings.get(field)) is not None and value not in served:
            values = ", ".join(str(one or "none") for one in served)
            raise ModelError(f"{path} is quantised as {name} with {field} {value!r}, which is not served; {values} is")


def read_packed(
    name: str, form: PackedFormat, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> PackedWeight:
    """Return the numbers of a layer's tensors, which have the format's names; on the meta device only their shapes.

    Raises:
        ModelError: they have numbers of other bits, or scales that do not fit.
    """
    weight, scales, zeros = tensors[form.weight], tensors[form.scales], tensors.get(form.zeros)
    groups, num_bits = tensors.get(form.groups), int(settings.get("bits") or 4)
    if (shape := tensors.get("weight_shape")) is not None:
        num_bits = 32 * weight.shape[1] // int(shape[1])
    num_bits = num_bits if weight.dtype == torch.int32 else 8
    if num_bits not in (4, 8):
        raise ModelError(f"{name} has weights of {num_bits} bits; weights of 4 and 8 bits are served")
    if weight.dtype == torch.int32:
        weight = _integers(weight, num_bits, form.axes[0], form.order)
        if zeros is not None:
            is_v2 = "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format"))
            zeros = _integers(zeros, num_bits, form.axes[1], form.order, 0 if is_v2 else form.zero)
    if form.inputs_first:
        weight, scales, zeros = weight.mT, scales.mT, None if zeros is None else zeros.mT
    outputs, inputs = weight.shape
    if scales.element_size() == 1:  # powers of two
        scales = scales.view(torch.float8_e8m0fnu).float()
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
    (rows, columns), num_groups = _block(settings), scales.shape[1]
    size = min(columns, inputs) if columns and -(-inputs // columns) == num_groups else -(-inputs // num_groups)
    if len(scales) < outputs:
        scales = scales.repeat_interleave(outputs if len(scales) == 1 else rows, 0)[:outputs]
    if len(scales) != outputs or -(-inputs // size) != num_groups:
        raise ModelError(f"{name} has scales of the shape {[*scales.shape]}, for weights of {[*weight.shape]}")
    if zeros is not None:
        zeros = zeros.reshape(1, 1) if zeros.numel() == 1 else zeros[:outputs].reshape(-1, num_groups)
        zeros = zeros.to(torch.int8).expand_as(scales) if zeros.is_meta or zeros.any() else None
    regular = torch.arange(inputs, device=weight.device) // size
    if groups is None:
        groups = None if size * num_groups == inputs else regular
    elif groups.is_meta:  # GPTQ always has them
        groups = groups if settings.get("desc_act", form.zero == 0) else None
    else:
        groups = None if torch.equal(groups.long(), regular) else groups.long()
    return PackedWeight(weight, scales, zeros, groups, num_bits)


def _integers(words: Tensor, num_bits: int, axis: int, order: Sequence[int], added: int = 0) -> Tensor:
    """Return the int8 numbers of int32 words along an axis, less half of their range."""
    places = [num_bits * place for place in (order if num_bits == 4 else range(4))]
    shifts = torch.tensor(places, device=words.device, dtype=torch.int32)
    numbers = (words.movedim(axis, -1).unsqueeze(-1) >> shifts) + added & (1 << num_bits) - 1
    return (numbers - (1 << num_bits - 1)).to(torch.int8).flatten(-2).movedim(-1, axis)


def _block(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale; 1 and 0 if that is not in blocks."""
    schemes = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    sizes = [settings.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
    rows, columns = next((size for size in sizes if size), (1, 0))
    return rows, columns
