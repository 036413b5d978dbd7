"""StateTensors: what linear layers keep of contexts, in slots beside the KV blocks."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execution.attention import Group, PagedContext
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors, PassExtras
from engine.hybrids.row_states import Carried, RowPlan, RowStates
from engine.models.causal_lm import CausalLM
from engine.models.layers.layer_state import LayerStates, Recurrence
from engine.protocols import SlotRow


class StateTensors(PassExtras):
    """The slots of all linear layers; slot 0 is never written, and stands for an empty context."""

    cuts_rows = False  # a state goes from token to token

    def __init__(self, model: CausalLM, num_slots: int, depth: int) -> None:
        """Allocate `num_slots`, including slot 0, each with room for the updates of `depth` draft tokens."""
        self._device, self.num_slots = model.device, num_slots
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.layers = [LayerStates(shape, num_slots, depth, like) for shape in model.state_shapes]

    def begin(
        self, rows: Sequence[ForwardRow], kv: KVTensors, *, carries: bool
    ) -> tuple[Sequence[ForwardRow], Carried | None]:
        return rows, Carried(len(rows)) if carries else None

    def of_group(
        self, rows: Sequence[ForwardRow], members: Sequence[int], length: int, added: Carried | None
    ) -> RowStates:
        return RowStates([_plan(row) for row in rows], length, self._device, added, members)

    def of_next(self, lengths: Sequence[int], added: Carried) -> RowStates:
        added.is_full = True
        plans = [RowPlan(SlotRow(0, 0), length, 1, 1, 0) for length in lengths]
        return RowStates(plans, 1, self._device, added, range(len(lengths)))

    def of(self, paged: PagedContext) -> "GroupStates":
        return GroupStates(self.layers, paged.groups)

    def first_layers(self, count: int) -> PassExtras:
        if not count:
            return PassExtras()
        view = copy.copy(self)
        view.layers = self.layers[:count]
        return view

    def keep_path(self, row: SlotRow, path: Sequence[int]) -> None:
        for layer in self.layers:
            nodes = torch.tensor(path, device=layer.inputs.device)
            for kept in layer.updates:
                kept[row.slot, : len(path)] = kept[row.slot, nodes]
            inputs = layer.inputs[row.slot, layer.taps :]
            inputs[: len(path)] = inputs[nodes]


@dataclass(frozen=True, slots=True)
class GroupStates:
    """The states of a pass's rows; see `StateContext`."""

    layers: Sequence[LayerStates]
    groups: Sequence[Group]

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kept = self.layers[layer]
        return torch.cat(
            [group.added.convolve(layer, kept, inputs[group.tokens], weight, bias) for group in self.groups]
        )

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        kept = self.layers[layer]
        return torch.cat(
            [group.added.recur(layer, kept, recurrence, [x[group.tokens] for x in inputs]) for group in self.groups]
        )


def _plan(row: ForwardRow) -> RowPlan:
    assert row.slot is not None, "a row of a model with linear layers has a state"
    num_committed = len(row.token_ids) - row.num_draft_tokens
    num_scanned = max(0, min(num_committed, row.prompt_length - row.start))
    return RowPlan(row.slot, row.start, len(row.token_ids), num_committed, num_scanned, row.parents)
