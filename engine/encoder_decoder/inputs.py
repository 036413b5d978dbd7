"""InputPasses: the encoder's inputs of passes, and the masks of a decoder's two attentions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.execution.attention import Group
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors, PassExtras, slots_of


class EncoderInput(NamedTuple):
    """An input to encode: its token ids, [n] int64, and the slots of its keys and values, [n]."""

    token_ids: Tensor
    slots: Tensor


class EncoderInputs(NamedTuple):
    """The inputs that a pass encodes, and the length of each row's input."""

    inputs: list[EncoderInput]
    lengths: list[int]


@dataclass(slots=True)
class GroupInputs:
    """The inputs of a group's rows: each context starts with `lengths` [rows] tokens of input."""

    lengths: Tensor
    _cross_mask: Tensor | None = None
    _biased_mask: tuple[Tensor, Tensor, Tensor] | None = None

    def cross_mask(self, group: Group, like: Tensor, block_size: int) -> Tensor:
        """Return the additive mask [rows, 1, 1, context] that shows only the input's tokens."""
        if self._cross_mask is None:
            places = torch.arange(group.blocks.shape[1] * block_size, device=group.blocks.device)
            visible = places < self.lengths.unsqueeze(-1)
            self._cross_mask = torch.where(visible, 0.0, float("-inf")).to(like.dtype)[:, None, None]
        return self._cross_mask

    def biased_mask(self, group: Group, bias: Tensor, block_size: int) -> Tensor:
        """Return the additive mask [rows, heads, length, context] of the decoder's self-attention.

        Layers with the same bias share the mask. Only the last mask is kept, because masks are large.

        Args:
            bias: [heads, distances] added to a score by the distance between two tokens; longer distances have the
                last bias (Raffel et al., arXiv:1910.10683, section 2.1).
        """
        if self._biased_mask is None or self._biased_mask[0] is not bias or self._biased_mask[1] is not group.limits:
            self._biased_mask = None
            places = torch.arange(group.blocks.shape[1] * block_size, device=group.limits.device)
            distances = group.limits.unsqueeze(-1) - 1 - places
            visible = (distances >= 0) & (places >= self.lengths[:, None, None])
            scores = bias[:, distances.clamp(0, bias.shape[1] - 1)].transpose(0, 1)
            self._biased_mask = bias, group.limits, scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
        return self._biased_mask[2]


class InputPasses(PassExtras):
    """Takes the inputs out of a pass's rows."""

    def __init__(self, model: Any, _num_slots: int, _depth: int) -> None:
        self._device = model.device

    def begin(
        self, rows: Sequence[ForwardRow], kv: KVTensors, *, carries: bool
    ) -> tuple[Sequence[ForwardRow], EncoderInputs]:
        inputs = [_input(row, kv) for row in rows if row.start < row.input_length]
        return [_without_input(row) for row in rows], EncoderInputs(inputs, [row.input_length for row in rows])

    def of_group(self, rows: Sequence[ForwardRow], members: Sequence[int], length: int, added: Any) -> GroupInputs:
        return self._of([row.input_length for row in rows for _ in range(0, len(row.token_ids), length)])

    def of_next(self, lengths: Sequence[int], added: EncoderInputs) -> GroupInputs:
        return self._of(added.lengths)

    def num_tokens(self, added: EncoderInputs | None) -> int:
        return 0 if added is None else sum(len(encoder_input.token_ids) for encoder_input in added.inputs)

    def _of(self, lengths: Sequence[int]) -> GroupInputs:
        return GroupInputs(torch.tensor(lengths, dtype=torch.int64, device=self._device))


def _input(row: ForwardRow, kv: KVTensors) -> EncoderInput:
    length = row.input_length
    assert row.start == 0, "an input is computed all at once"
    assert len(row.token_ids) >= length, "an input is computed all at once"
    columns = torch.tensor([list(row.token_ids[:length]), list(range(length))], device=kv.input_device)
    blocks = torch.tensor([list(row.block_ids)], device=kv.input_device)
    return EncoderInput(columns[0], slots_of(blocks, columns[1:], kv.block_size)[0])


def _without_input(row: ForwardRow) -> ForwardRow:
    if (num_inputs := max(0, row.input_length - row.start)) == 0:
        return row
    return replace(row, token_ids=row.token_ids[num_inputs:], start=row.start + num_inputs)
