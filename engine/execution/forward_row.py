"""ForwardRow: the tokens that a pass computes for a request, their positions, and what they attend to.

If a draft branches, its nodes lie side by side in the context; each attends to the committed tokens and to its path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocols import SlotRow


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """Consecutive tokens to compute for one request.

    Attributes:
        token_ids: committed tokens, then the draft's nodes.
        start: index of the first token in the request's context.
        block_ids: the request's block table; the result of `block_table` is copied fastest.
        num_logits: how many of the last tokens need logits.
        parents: of the last tokens, a draft that branches; None for a chain.
        input_length: see `Request`; if it is not 0, no draft branches.
        num_draft_tokens: how many of the last tokens are a draft.
        slot: what a kind of cache keeps beside keys and values, if that needs slots.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None
    input_length: int = 0
    num_draft_tokens: int = 0
    prompt_length: int = 0
    slot: SlotRow | None = None


def depths(parents: Sequence[int]) -> list[int]:
    """Return each node's distance from the committed tip, 1 for its children."""
    node_depths: list[int] = []
    for parent in parents:
        node_depths.append(1 if parent < 0 else node_depths[parent] + 1)
    return node_depths


def positions(row: ForwardRow) -> Sequence[int]:
    """Return each token's position, which is not its place in the context if the draft branches."""
    end = row.start + len(row.token_ids)
    if row.parents is None:
        return range(row.start, end)
    tip = end - len(row.parents) - 1
    return [*range(row.start, tip + 1), *(tip + depth for depth in depths(row.parents))]


def limits(row: ForwardRow) -> Sequence[int]:
    """Return each token's attention limit: committed tokens see up to themselves, nodes up to the tip."""
    end = row.start + len(row.token_ids)
    if row.parents is None:
        return range(row.start + 1, end + 1)
    num_nodes = len(row.parents)
    return [*range(row.start + 1, end - num_nodes + 1), *[end - num_nodes] * num_nodes]


def seen_nodes(rows: Sequence[ForwardRow], length: int) -> list[list[Sequence[int]]]:
    """Return the places of each token's path in its draft (its own included), padded with 0: [rows, length, x]."""
    paths: list[list[int]] = []
    for row in rows:
        parents = row.parents or ()
        first = row.start + len(row.token_ids) - len(parents)
        nodes: list[list[int]] = []
        for node, parent in enumerate(parents):
            nodes.append([*(nodes[parent] if parent >= 0 else ()), first + node])
        committed = len(row.token_ids) - len(parents)
        paths += [[]] * committed + nodes + [[]] * (-len(row.token_ids) % length)
    deepest = max(len(path) for path in paths)
    entries = [padded(path, deepest, 0) for path in paths]
    return [entries[first : first + length] for first in range(0, len(entries), length)]


def padded(values: Sequence[int], length: int, filler: int) -> Sequence[int]:
    """Append `filler` up to a length."""
    return values if len(values) == length else [*values, *[filler] * (length - len(values))]
