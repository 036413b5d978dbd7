"""ForwardBatch: the rows of one forward pass, flattened to tokens, positions, slots and attention groups."""

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.blocks.block_pool import block_table
from engine.execution.attention import Group, PagedContext
from engine.execution.forward_row import ForwardRow, limits, padded, positions, seen_nodes
from engine.execution.kv_tensors import KVTensors

MAX_GROUPED_LENGTH = 16
"""Rows of up to this many tokens, those of their draft but one not counted, form one group; others are prefill chunks.
"""
MAX_DRAFT_LENGTH = 64
_MAX_LENGTH = 24
"""Tokens of a row of that group, at most; a longer draft goes on in further rows. GPUs have graphs for such lengths."""
_PADDING = 1.25
"""Tokens of a group in which rows are cut, padding included, over those without it, at most."""


@dataclass(slots=True)
class ForwardBatch:
    """The tensors of one forward pass.

    Attributes:
        token_ids: [tokens] int64; may be empty.
        logit_indices: [n] flat indices of the tokens that need logits, in row order.
        paged: the inputs of the attention function.
        added: what the kind of cache adds to the pass; see `PassExtras`.
        needs_logits: whether the caller reads logits or scores; if not, a backend may return tokens only, and ranks
            that compute a slice of the vocabulary each do not gather them. All ranks must say the same.
    """

    token_ids: Tensor
    logit_indices: Tensor
    paged: PagedContext
    needs_logits: bool = True
    added: Any = None

    @property
    def num_tokens(self) -> int:
        """How many tokens the pass computes, padding included."""
        return len(self.token_ids) + self.paged.kv.extras.num_tokens(self.added)

    @property
    def positions(self) -> Tensor:
        """Positions for the rotary embedding, [tokens] int64."""
        return torch.cat([group.positions.flatten() for group in self.paged.groups])


def build(rows: Sequence[ForwardRow], kv: KVTensors, *, carries: bool = False) -> ForwardBatch:
    """Flatten rows into a batch: short rows as one padded group, then each long row; logits stay in row order.

    Args:
        carries: the pass leaves what it adds to slots to the passes after it, and the slots as they are.
    """
    rows, added = kv.extras.begin(rows, kv, carries=carries)
    short = [i for i, row in enumerate(rows) if row.token_ids and _is_short(row)]
    long = [i for i, row in enumerate(rows) if not _is_short(row)]
    lengths = [len(rows[i].token_ids) for i in short]
    length = _common_length(lengths) if kv.extras.cuts_rows else max(lengths, default=0)
    clusters = ([(length, short)] if short else []) + [(len(rows[i].token_ids), [i]) for i in long]
    tokens: list[Tensor] = []
    groups: list[Group] = []
    ends = [0] * len(rows)
    start = 0
    for length, members in clusters:
        group_rows = [rows[i] for i in members]
        ids, group = _group(group_rows, length, start, kv)
        group.added = kv.extras.of_group(group_rows, members, length, added)
        groups.append(group)
        tokens.append(ids.flatten())
        for i in members:
            ends[i] = start + len(rows[i].token_ids)
            start += -(-len(rows[i].token_ids) // length) * length
    indices = [i for row, end in zip(rows, ends, strict=True) for i in range(end - row.num_logits, end)]
    logit_indices = torch.tensor(indices, dtype=torch.int64, device=kv.input_device)
    return ForwardBatch(
        token_ids=tokens[0] if len(tokens) == 1 else torch.cat([logit_indices[:0], *tokens]),
        logit_indices=logit_indices,
        paged=PagedContext(kv, groups),
        added=added,
    )


def _is_short(row: ForwardRow) -> bool:
    """Return whether a row decodes, or has little left of its prompt."""
    length = len(row.token_ids)
    return length - max(row.num_logits, 1) < MAX_GROUPED_LENGTH and length <= MAX_GROUPED_LENGTH + MAX_DRAFT_LENGTH


def _common_length(lengths: Sequence[int]) -> int:
    """Return the length of a group's rows; longer ones are cut.

    Several groups would take several compiled passes, or none, and padding a long draft's neighbours takes as long as
    computing them. So this is the largest length that needs little padding.
    """
    longest = max(lengths, default=0)
    if longest <= MAX_GROUPED_LENGTH:
        return longest
    most = _PADDING * sum(lengths)
    fitting = (
        length
        for length in range(min(longest, _MAX_LENGTH), 0, -1)
        if sum(-(-count // length) for count in lengths) * length <= most
    )
    return next(fitting)


def _group(rows: Sequence[ForwardRow], length: int, start: int, kv: KVTensors) -> tuple[Tensor, Group]:
    """Return the tokens [rows, length] of some rows and their group.

    A row with more tokens takes several rows of the group: a pass writes all keys and values before any token attends.
    """
    device = kv.input_device
    width = max(-(-(row.start + len(row.token_ids)) // kv.block_size) for row in rows)
    parts = [(row, slice(first, first + length)) for row in rows for first in range(0, len(row.token_ids), length)]
    # Padding tokens attend to one place, so that their softmax is finite.
    columns = [
        *(padded(row.token_ids[part], length, 0) for row, part in parts),
        *(padded(positions(row)[part], length, 0) for row, part in parts),
        *(padded(range(row.start, row.start + len(row.token_ids))[part], length, -1) for row, part in parts),
        *(padded(limits(row)[part], length, row.input_length + 1) for row, part in parts),
    ]
    # One tensor, because each takes microseconds to make, and on a GPU a copy.
    numbers = array("q", itertools.chain.from_iterable(columns)).tobytes()
    fields = [numbers, *_tables([row.block_ids for row, _ in parts], width)]
    packed = torch.frombuffer(bytearray().join(fields), dtype=torch.int64).to(device)
    size = len(parts) * length
    tokens, group_positions, places, group_limits = packed[: 4 * size].view(4, len(parts), length)
    branches = any(row.parents is not None for row in rows)
    return tokens, Group(
        start=start,
        rows=len(parts),
        length=length,
        blocks=packed[4 * size :].view(len(parts), width),
        positions=group_positions,
        places=places,
        limits=group_limits,
        extra=torch.tensor(seen_nodes(rows, length), dtype=torch.int64, device=device) if branches else None,
        is_prompt_start=len(parts) == 1 and rows[0].start == 0 and rows[0].parents is None and length > 1,
    )


def _tables(tables: Sequence[Sequence[int]], width: int) -> list[bytes]:
    """Return the rows of a tensor [rows, width] of block tables as bytes, which are faster to copy than numbers."""
    return [block_table(table)[:width].tobytes().ljust(width * 8, b"\0") for table in tables]


def block_tensor(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return block tables as a tensor [rows, width] of at least one column, padded with block 0."""
    width = max(1, *map(len, tables))
    return torch.frombuffer(bytearray().join(_tables(tables, width)), dtype=torch.int64).view(-1, width).to(device)


def next_tokens(
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    steps: int,
    kv: KVTensors,
    max_length: int,
    added: Any = None,
) -> Callable[[int, Tensor], ForwardBatch]:
    """Prepare `steps` passes that append one token per row all at once, so that the device never waits for the host.

    Args:
        tables: the rows' block tables; tokens beyond the end of a table are written to block 0.
        lengths: the rows' context lengths; the first pass writes there.
        max_length: the model's context length; positions of surplus tokens are clamped to it.
        added: that of the pass before these.

    Returns:
        A function of a step, from 0, and of its token ids [rows]; it returns the step's batch.
    """
    device = kv.input_device
    blocks = block_tensor(tables, device)
    places = torch.arange(steps + 1).view(-1, 1, 1) + torch.tensor(lengths).view(-1, 1)  # [steps + 1, rows, 1]
    places = places.to(device)
    positions = places.clamp(max=max_length - 1)
    indices = torch.arange(len(tables), device=device)
    group_added = kv.extras.of_next(lengths, added)

    def batch(step: int, token_ids: Tensor) -> ForwardBatch:
        group = Group(0, len(tables), 1, blocks, positions[step], places[step], places[step + 1], added=group_added)
        return ForwardBatch(token_ids, indices, PagedContext(kv, [group]))

    return batch
