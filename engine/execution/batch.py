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
"""Rows with up to this many tokens besides their draft form one group; other rows are prefill chunks."""
MAX_DRAFT_LENGTH = 64
_MAX_LENGTH = 24
"""Maximal length of that group's rows, for which GPUs have graphs; a longer draft continues in further rows."""
_PADDING = 1.25
"""Maximal ratio of a group's tokens with padding to its tokens without, if rows are cut."""


@dataclass(slots=True)
class ForwardBatch:
    """The tensors of one forward pass.

    Attributes:
        token_ids: [tokens] int64; may be empty.
        logit_indices: [n] flat indices of the tokens that need logits, in row order.
        added: what the kind of cache adds to the pass; see `PassExtras`.
        needs_logits: whether the caller reads logits or scores; if not, a backend may return only tokens.
    """

    token_ids: Tensor
    logit_indices: Tensor
    paged: PagedContext
    needs_logits: bool = True
    added: Any = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pass computes, including padding."""
        return len(self.token_ids) + self.paged.kv.extras.num_tokens(self.added)

    @property
    def positions(self) -> Tensor:
        """Positions for the rotary embedding, [tokens] int64."""
        return torch.cat([group.positions.flatten() for group in self.paged.groups])


def build(rows: Sequence[ForwardRow], kv: KVTensors, *, carries: bool = False) -> ForwardBatch:
    """Flatten rows into a batch: short rows as one padded group, then each long row; logits stay in row order.

    `carries`: see `PassExtras.begin`.
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
    length = len(row.token_ids)
    return length - max(row.num_logits, 1) < MAX_GROUPED_LENGTH and length <= MAX_GROUPED_LENGTH + MAX_DRAFT_LENGTH


def _common_length(lengths: Sequence[int]) -> int:
    """Return the largest length of a group's rows with little padding, because padding takes as long as tokens."""
    longest = max(lengths, default=0)
    if longest <= MAX_GROUPED_LENGTH:
        return longest
    max_tokens = _PADDING * sum(lengths)
    fitting = (
        length
        for length in range(min(longest, _MAX_LENGTH), 0, -1)
        if sum(-(-count // length) for count in lengths) * length <= max_tokens
    )
    return next(fitting)


def _group(rows: Sequence[ForwardRow], length: int, start: int, kv: KVTensors) -> tuple[Tensor, Group]:
    """Return the group of some rows and its tokens [rows, length]; a longer row continues in further rows."""
    device = kv.input_device
    width = max(-(-(row.start + len(row.token_ids)) // kv.block_size) for row in rows)
    # Rows can be cut, because a pass writes all keys and values before any token attends.
    spans = [(row, slice(first, first + length)) for row in rows for first in range(0, len(row.token_ids), length)]
    # Padding tokens attend to one place, so that their softmax is finite.
    columns = [
        *(padded(row.token_ids[span], length, 0) for row, span in spans),
        *(padded(positions(row)[span], length, 0) for row, span in spans),
        *(padded(range(row.start, row.start + len(row.token_ids))[span], length, -1) for row, span in spans),
        *(padded(limits(row)[span], length, row.input_length + 1) for row, span in spans),
    ]
    # One tensor, because making each takes microseconds, and on a GPU a copy.
    numbers = array("q", itertools.chain.from_iterable(columns)).tobytes()
    fields = [numbers, *_tables([row.block_ids for row, _ in spans], width)]
    packed = torch.frombuffer(bytearray().join(fields), dtype=torch.int64).to(device)
    size = len(spans) * length
    tokens, group_positions, places, group_limits = packed[: 4 * size].view(4, len(spans), length)
    branches = any(row.parents is not None for row in rows)
    return tokens, Group(
        start=start,
        rows=len(spans),
        length=length,
        blocks=packed[4 * size :].view(len(spans), width),
        positions=group_positions,
        places=places,
        limits=group_limits,
        extra=torch.tensor(seen_nodes(rows, length), dtype=torch.int64, device=device) if branches else None,
        is_prompt_start=len(spans) == 1 and rows[0].start == 0 and rows[0].parents is None and length > 1,
    )


def _tables(tables: Sequence[Sequence[int]], width: int) -> list[bytes]:
    """Return block tables as bytes of `width` int64 each, because bytes are faster to copy than numbers."""
    return [block_table(table)[:width].tobytes().ljust(width * 8, b"\0") for table in tables]


def block_tensor(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return block tables as a tensor [rows, width], width at least 1, padded with block 0."""
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
    """Prepare `steps` passes that append a token per row, all at once, so that the device never waits for the host.

    Args:
        tables: the rows' block tables; tokens beyond the end of a table are written to block 0.
        lengths: the rows' context lengths before the first pass.
        max_length: the model's context length, to which positions of surplus tokens are clamped.
        added: `ForwardBatch.added` of the pass before.

    Returns:
        A function that makes a step's batch of the step, from 0, and its token ids [rows].
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
