"""ForwardBatch: the rows of one forward pass, flattened to tokens, positions, slots and attention groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import Group, KVTensors, PagedContext

MAX_GROUPED_LENGTH = 16
"""Rows of up to this many tokens are padded to one length and attend together; longer ones are prefill chunks."""


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """A run of tokens to compute for one request.

    Attributes:
        token_ids: the tokens, committed ones first, then the draft's nodes.
        start: place of the first token in the request's context.
        block_ids: the request's block table.
        num_logits: logits are wanted for the last so many tokens.
        parents: the draft's tree, for the last `len(parents)` tokens; None is a chain.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None


@dataclass(slots=True)
class ForwardBatch:
    """The tensors of one forward pass.

    Attributes:
        token_ids: [tokens] int64.
        positions: [tokens] int64, for the rotary embedding.
        logit_indices: [n] the flat indices of the tokens whose logits are wanted, in row order.
        paged: slots and groups, for the attention function.
    """

    token_ids: Tensor
    positions: Tensor
    logit_indices: Tensor
    paged: PagedContext


def depths(parents: Sequence[int]) -> list[int]:
    """Return each node's distance from the committed tip, 1 for its children."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def build(rows: Sequence[ForwardRow], kv: KVTensors) -> ForwardBatch:
    """Flatten rows into a batch: the short rows as one padded group, then the long ones. Keeps the order of logits."""
    short = [i for i, row in enumerate(rows) if len(row.token_ids) <= MAX_GROUPED_LENGTH]
    long = [i for i, row in enumerate(rows) if len(row.token_ids) > MAX_GROUPED_LENGTH]
    clusters = ([short] if short else []) + [[i] for i in long]
    device, block_size = kv.keys[0].device, kv.block_size
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    slots: list[Tensor] = []
    groups: list[Group] = []
    ends = [0] * len(rows)
    start = 0
    for members in clusters:
        length = max(len(rows[i].token_ids) for i in members)
        group_rows = [rows[i] for i in members]
        group, ids, places, group_slots = _group(group_rows, length, start, block_size, device)
        groups.append(group)
        tokens.append(ids)
        positions.append(places)
        slots.append(group_slots)
        for nth, i in enumerate(members):
            ends[i] = start + nth * length + len(rows[i].token_ids)
        start += len(members) * length
    wanted = [i for row, end in zip(rows, ends, strict=True) for i in range(end - row.num_logits, end)]
    return ForwardBatch(
        token_ids=torch.cat(tokens) if len(tokens) > 1 else tokens[0],
        positions=torch.cat(positions) if len(positions) > 1 else positions[0],
        logit_indices=torch.tensor(wanted, dtype=torch.int64, device=device),
        paged=PagedContext(kv, torch.cat(slots) if len(slots) > 1 else slots[0], groups),
    )


def _group(
    rows: Sequence[ForwardRow], length: int, start: int, block_size: int, device: torch.device
) -> tuple[Group, Tensor, Tensor, Tensor]:
    """Return a group with its flat tokens, positions and slots, each [rows * length]."""
    num_blocks = max(-(-(row.start + len(row.token_ids)) // block_size) for row in rows)
    tokens, tables, places, lengths = [], [], [], []
    for row in rows:
        count = len(row.token_ids)
        tokens.append([*row.token_ids, *[0] * (length - count)])
        blocks = row.block_ids[:num_blocks]
        tables.append([*blocks, *[0] * (num_blocks - len(blocks))])
        places.append(row.start)
        lengths.append(count)
    ids = torch.tensor(tokens, dtype=torch.int64, device=device)
    table = torch.tensor(tables, dtype=torch.int64, device=device)
    offsets = torch.arange(length, device=device)
    query_slots = torch.tensor(places, dtype=torch.int64, device=device)[:, None] + offsets
    is_padding = None
    if min(lengths) < length:
        is_padding = offsets >= torch.tensor(lengths, device=device)[:, None]
        # A padding query sees place 0, so that its softmax is finite, and writes to block 0, which is nobody's.
        query_slots = query_slots.masked_fill(is_padding, 0)
    slots = table.gather(1, query_slots // block_size) * block_size + query_slots % block_size
    if is_padding is not None:
        slots = slots.masked_fill(is_padding, 0)
    positions, visible = query_slots, None
    if any(row.parents is not None for row in rows):
        positions, visible = _trees(rows, query_slots, num_blocks * block_size)
    group = Group(
        start=start,
        rows=len(rows),
        length=length,
        blocks=table.flatten(),
        positions=positions,
        visible=visible,
        is_prompt_start=len(rows) == 1 and rows[0].start == 0 and rows[0].parents is None and length > 1,
    )
    return group, ids.flatten(), positions.flatten(), slots.flatten()


def _trees(rows: Sequence[ForwardRow], query_slots: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return rotary positions [rows, length] and visibility [rows, length, context] of rows that hold trees."""
    positions = query_slots.clone()
    visible = torch.arange(context, device=query_slots.device) <= query_slots.unsqueeze(-1)
    for r, row in enumerate(rows):
        if row.parents is None:
            continue
        first = len(row.token_ids) - len(row.parents)
        tip = row.start + first - 1
        for node, (parent, depth) in enumerate(zip(row.parents, depths(row.parents), strict=True)):
            positions[r, first + node] = tip + depth
            # A node sees what its parent sees, and itself.
            above = first - 1 if parent < 0 else first + parent
            visible[r, first + node] = visible[r, above]
            visible[r, first + node, tip + 1 + node] = True
    return positions, visible


@dataclass(slots=True)
class NextTokens:
    """Forward passes that append one token to each of some rows; all but the tokens is known beforehand.

    Attributes:
        positions: [steps, rows]; slots: [steps, rows].
        groups: one per step.
        indices: [rows], the logits of every row are wanted.
    """

    kv: KVTensors
    positions: Tensor
    slots: Tensor
    groups: list[Group]
    indices: Tensor

    def at(self, step: int, token_ids: Tensor) -> ForwardBatch:
        """Return the pass that computes `token_ids` [rows] as the rows' next tokens."""
        paged = PagedContext(self.kv, self.slots[step], [self.groups[step]])
        return ForwardBatch(token_ids, self.positions[step], self.indices, paged)


def next_tokens(tables: Sequence[Sequence[int]], positions: Tensor, steps: int, kv: KVTensors) -> NextTokens:
    """Prepare `steps` passes at once, so that no step waits for the host.

    Args:
        tables: the rows' block tables. A row whose table ends early writes its surplus tokens to block 0.
        positions: [rows] int64, where the first pass puts its tokens.
    """
    device = positions.device
    width = max(len(table) for table in tables) + 1
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in tables], dtype=torch.int64, device=device)
    places = positions + torch.arange(steps, device=device).unsqueeze(-1)
    slots = (
        table.gather(1, (places.T // kv.block_size).clamp_(max=width - 1)).T * kv.block_size + places % kv.block_size
    )
    groups = [Group(0, len(tables), 1, table[:, :-1].flatten(), row.unsqueeze(-1), None, False) for row in places]
    return NextTokens(kv, places, slots, groups, torch.arange(len(tables), device=device))
