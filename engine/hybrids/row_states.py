"""RowStates: how the rows of a pass continue the states of linear layers, which are in slots of the cache.

A slot holds the state after its request's last committed token, and the updates of the draft tokens after that. The
request's next pass first applies the updates of accepted tokens. These are the same operations on the same numbers as
without drafts, so the state is equal to the last bit.

Prompts are computed in chunks that start at absolute places, later tokens singly. So results do not depend on drafts,
on other rows, or on how tokens are spread over passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.layers.layer_state import LayerStates, Recurrence, Update, updated
from engine.protocols import SlotRow


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The tokens of one row of a pass.

    Attributes:
        start: the place of the first token in the context.
        num_committed: number of tokens before the draft.
        num_scanned: number of first tokens that are computed in chunks: the prompt's.
        parents: of the draft's tokens, if it branches; None for a chain.
    """

    state: SlotRow
    start: int
    length: int
    num_committed: int
    num_scanned: int
    parents: Sequence[int] | None = None

    def parent(self, token: int) -> int:
        """Return the index in the row of a token's predecessor; -1 is the last token before the row."""
        node = token - self.num_committed
        if node < 0 or self.parents is None or token >= self.length:
            return token - 1
        return self.num_committed + self.parents[node] if self.parents[node] >= 0 else self.num_committed - 1


class _Step(NamedTuple):
    """What happens to the states of a group's rows at one column of tokens.

    Attributes:
        active: [rows, 1, 1] which rows have a token there; None if all have.
        before: per row, how many of its tokens precede this token in its context; None if all before it do.
        committed: rows for which this is the last committed token, and their slots.
        drafted: rows for which this is a draft token, their slots, and the token's index in the draft.
        saved: rows, and other slots that get their states.
    """

    active: Tensor | None
    before: list[int] | None
    committed: tuple[Tensor, Tensor] | None
    drafted: tuple[Tensor, Tensor, Tensor] | None
    saved: list[tuple[int, int]]


@dataclass(slots=True)
class Carried:
    """States that the passes of a draft hand on to each other, while the slots stay unchanged.

    Attributes:
        is_full: whether a pass has left its rows' states here.
        inputs: [rows, taps, channels] by layer.
        matrices: [rows, heads, rows, columns] by layer.
    """

    num_rows: int
    is_full: bool = False
    inputs: dict[int, Tensor] = field(default_factory=dict)
    matrices: dict[int, Tensor] = field(default_factory=dict)


class RowStates:
    """How the rows of a group continue their states; what all layers share is prepared once per pass."""

    def __init__(
        self,
        plans: Sequence[RowPlan],
        width: int,
        device: torch.device,
        carried: Carried | None = None,
        members: Sequence[int] = (),
    ) -> None:
        """Prepare a group of rows, padded to `width` tokens.

        Args:
            carried: gets the states after the last tokens, in place of the slots.
            members: the indices of the group's rows in `carried`.
        """
        self._plans, self._width, self._device, self._carried = plans, width, device, carried
        self._members = self._tensor(members)
        self._past = carried if carried is not None and carried.is_full else None
        self._sources = self._tensor([plan.state.source for plan in plans])
        self._slots = self._tensor([plan.state.slot for plan in plans])
        self._folds = self._tensor([plan.state.num_folded for plan in plans])
        self._ends = self._tensor([plan.length if carried else plan.num_committed for plan in plans])
        self._branches = any(plan.parents is not None for plan in plans)
        self._fold_steps = [self._fold_step(fold) for fold in range(max(plan.state.num_folded for plan in plans))]
        self._first_step = min(plan.num_scanned for plan in plans)
        last = max((plan.length for plan in plans if plan.num_scanned < plan.length), default=0)
        self._steps = [self._step(token) for token in range(self._first_step, last)]
        self._paths: dict[int, Tensor] = {}

    def convolve(self, layer: int, kept: LayerStates, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tokens = inputs.view(len(self._plans), self._width, -1)
        taps, carried = kept.taps, self._carried
        window = kept.inputs.index_select(0, self._sources)
        past = self._past.inputs[layer][self._members] if self._past else _cut(window, self._folds, taps)
        seen = torch.cat([past, tokens.to(past.dtype)], 1)
        output = torch.zeros_like(tokens, dtype=torch.float32)
        for tap in range(taps + 1):  # in this order, whatever the pass
            output = output + self._column(seen, tap, taps).float() * weight[:, tap].float()
        if bias is not None:
            output = output + bias.float()
        last = _cut(seen, self._ends, taps)
        if carried is not None:
            self._carry(carried.inputs, layer, last)
        else:
            self._save_inputs(kept, window, tokens)
            depth = kept.inputs.shape[1] - taps
            drafts = _cut(F.pad(seen, (0, 0, 0, depth)), self._ends + taps, depth)
            kept.inputs.index_copy_(0, self._slots, torch.cat([last, drafts], 1))
        return output.to(inputs.dtype).flatten(0, 1)

    def recur(self, layer: int, kept: LayerStates, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        tokens = [entry.view(len(self._plans), self._width, *entry.shape[1:]) for entry in inputs]
        state = self._first(layer, kept)
        scanned = [
            self._scan(kept, recurrence, row, state, [entry[row] for entry in tokens])
            for row, plan in enumerate(self._plans)
            if plan.num_scanned
        ]
        history, outputs = [state] * (self._first_step + 1), []
        for token, step in enumerate(self._steps, self._first_step):
            entry = [x[:, token] for x in tokens]
            if step.before is not None:
                state = torch.stack([history[end][row] for row, end in enumerate(step.before)])
            update = _masked(recurrence.update(state, entry), step.active)
            state = updated(state, update)
            outputs.append(recurrence.output(state, entry))
            if self._branches:
                history.append(state)
            self._keep(kept, step, state, update)
        if self._carried is not None:
            self._carry(self._carried.matrices, layer, state)
        return self._joined(outputs, scanned)

    def _first(self, layer: int, kept: LayerStates) -> Tensor:
        """Return the states before the rows' first tokens, [rows, heads, rows, columns]."""
        if self._past is not None:
            return self._past.matrices[layer].index_select(0, self._members)
        state = kept.matrices.index_select(0, self._sources)
        for fold, step in enumerate(self._fold_steps):
            update = Update(*(stored[self._sources, fold] for stored in kept.updates))
            state = updated(state, _masked(update, step.active))
            self._keep(kept, step, state, update)
        return state

    def _scan(
        self, kept: LayerStates, recurrence: Recurrence, row: int, state: Tensor, tokens: Sequence[Tensor]
    ) -> Tensor:
        """Compute a row's prompt tokens in chunks, set the row of `state`, and return the outputs."""
        plan, outputs, first = self._plans[row], [], 0
        saves = {place - plan.start: slot for place, slot in plan.state.saves}
        for end in sorted({*saves, plan.num_scanned}):
            if not first < end <= plan.num_scanned:
                continue
            output, state[row] = recurrence.scan(state[row], [entry[first:end] for entry in tokens])
            outputs.append(output)
            first = end
            if self._carried is None and end in saves:
                kept.matrices[saves[end]] = state[row]
        if self._carried is None and plan.num_scanned == plan.num_committed:
            kept.matrices[plan.state.slot] = state[row]
        return torch.cat(outputs)

    def _joined(self, outputs: Sequence[Tensor], scanned: Sequence[Tensor]) -> Tensor:
        """Return the outputs of the steps and of the scans, [rows * width, heads, size]."""
        rows = [row for row, plan in enumerate(self._plans) if plan.num_scanned]
        like = outputs[0] if outputs else scanned[0]
        joined = like.new_zeros(len(self._plans), self._width, *like.shape[1:])
        for token, output in enumerate(outputs, self._first_step):
            joined[:, token] = output
        for row, output in zip(rows, scanned, strict=True):
            joined[row, : len(output)] = output
        return joined.flatten(0, 1)

    def _keep(self, kept: LayerStates, step: _Step, state: Tensor, update: Update) -> None:
        if self._carried is not None:
            return
        if step.committed is not None:
            rows, slots = step.committed
            kept.matrices.index_copy_(0, slots, state.index_select(0, rows))
        if step.drafted is not None:
            rows, slots, nodes = step.drafted
            for stored, new in zip(kept.updates, update, strict=True):
                stored[slots, nodes] = new[rows]
        for row, slot in step.saved:
            kept.matrices[slot] = state[row]

    def _carry(self, entries: dict[int, Tensor], layer: int, after: Tensor) -> None:
        assert self._carried is not None
        if layer not in entries:
            entries[layer] = after.new_zeros(self._carried.num_rows, *after.shape[1:])
        entries[layer].index_copy_(0, self._members, after)

    def _save_inputs(self, kept: LayerStates, window: Tensor, tokens: Tensor) -> None:
        for row, plan in enumerate(self._plans):
            first = plan.start - plan.state.num_folded
            for place, slot in plan.state.saves:
                seen = torch.cat([window[row, : kept.taps + plan.state.num_folded], tokens[row].to(window.dtype)])
                kept.inputs[slot, : kept.taps] = seen[place - first : place - first + kept.taps]

    def _column(self, seen: Tensor, tap: int, taps: int) -> Tensor:
        """Return each token's input of a tap: [rows, taps + width, channels] -> [rows, width, channels]."""
        if not self._branches:
            return seen[:, tap : tap + self._width]
        if taps not in self._paths:
            paths = [[_path(plan, token, taps) for token in range(self._width)] for plan in self._plans]
            self._paths[taps] = self._tensor(paths) + taps
        rows = torch.arange(len(self._plans), device=self._device).unsqueeze(-1)
        return seen[rows, self._paths[taps][:, :, tap]]

    def _fold_step(self, fold: int) -> _Step:
        active = [fold < plan.state.num_folded for plan in self._plans]
        counts = [fold + 1 - plan.state.num_folded for plan in self._plans]
        return _Step(self._mask(active), None, None, None, self._saved(counts, active))

    def _step(self, token: int) -> _Step:
        plans = self._plans
        active = [plan.num_scanned <= token < plan.length for plan in plans]
        before = [plan.parent(token) + 1 if runs else token for plan, runs in zip(plans, active, strict=True)]
        ends = [row for row, plan in enumerate(plans) if active[row] and token == plan.num_committed - 1]
        drafts = [row for row, plan in enumerate(plans) if active[row] and token >= plan.num_committed]
        nodes = self._tensor([token - plans[row].num_committed for row in drafts])
        return _Step(
            active=self._mask(active),
            before=None if before == [token] * len(plans) else before,
            committed=(self._tensor(ends), self._slots[ends]) if ends else None,
            drafted=(self._tensor(drafts), self._slots[drafts], nodes) if drafts else None,
            saved=self._saved([token + 1] * len(plans), active),
        )

    def _saved(self, counts: Sequence[int], active: Sequence[bool]) -> list[tuple[int, int]]:
        """Return the active rows whose states after `counts` tokens are saved, and the slots for them."""
        rows = enumerate(zip(self._plans, counts, active, strict=True))
        ends = [(row, plan.state.saves, plan.start + count) for row, (plan, count, runs) in rows if runs]
        return [(row, slot) for row, saves, end in ends for place, slot in saves if place == end]

    def _mask(self, active: Sequence[bool]) -> Tensor | None:
        return None if all(active) else self._tensor(active)[:, None, None]

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, device=self._device)


def _path(plan: RowPlan, token: int, taps: int) -> list[int]:
    """Return the indices of the last `taps` tokens before a token, and its own."""
    path = [token]
    for _ in range(taps):
        path.append(plan.parent(path[-1]))
    return path[::-1]


def _masked(update: Update, active: Tensor | None) -> Update:
    if active is None:
        return update
    # Inactive rows keep their states. `right` is masked, too: a stale entry may be infinite.
    return Update(update.decay.where(active, 1.0), *(factor.where(active, 0.0) for factor in update[1:]))


def _cut(inputs: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return each row's inputs from its start on: [rows, n, channels] -> [rows, length, channels]."""
    index = starts.unsqueeze(-1) + torch.arange(length, device=inputs.device)
    return inputs[torch.arange(len(inputs), device=inputs.device).unsqueeze(-1), index]
