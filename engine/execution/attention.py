"""The attention function handed to transformers: paged, batched by group, tree-masked.

`KVTensors` holds the keys and values of every layer in blocks. A forward pass is a flat run of tokens, cut into groups:
one group of all short rows (decoding, drafts; padded to the same length), and one per prefill chunk. Each group brings
the block table it reads and the mask it reads through. The function is registered with transformers under one
name, which is not in its mask registry, so transformers builds no mask of its own.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.errors import ModelError
from engine.execution.cpu.paged_attention import attend, attend_to_blocks, suits

ATTENTION_NAME = "paceline"
_UNDERSTOOD = {
    "sliding_window",
    "dropout",
    "position_ids",
    "paged",
    "is_causal",
    "use_cache",
    "output_attentions",
    "output_router_logits",
}


class KVTensors:
    """Keys and values of all layers, each [num_blocks, block_size, kv_heads, head_dim]."""

    def __init__(self, shape: tuple[int, int, int], num_blocks: int, block_size: int, like: Tensor) -> None:
        layers, kv_heads, head_dim = shape
        size = (num_blocks, block_size, kv_heads, head_dim)
        self.block_size = block_size
        # Zeros, not empty: a masked entry still meets its weight 0, and 0 * nan is nan.
        self.keys = [torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(layers)]
        self.values = [torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(layers)]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `sources` [n] to `targets` [n] in every layer: keeps an accepted path that is not a chain."""
        for cache in (*self.keys, *self.values):
            slots = cache.view(-1, *cache.shape[2:])
            slots[targets] = slots[sources]


@dataclass(slots=True)
class Group:
    """Rows of one forward pass that share a query length.

    Attributes:
        start: index of the first token in the flat run.
        rows: how many rows.
        length: tokens per row, padding included.
        blocks: [rows, width] the block tables.
        positions: [rows, length] for the rotary embedding.
        places: [rows, length] where in its row's context each token's entry goes; -1 is padding, which goes to block 0.
        limits: [rows, length] each token sees the places before its limit.
        extra: [rows, length, x] what else each token sees, for trees; None is nothing. A window counts places, so
            it has to be longer than a tree is large.
        is_prompt_start: whether the one row attends to nothing but itself.
    """

    start: int
    rows: int
    length: int
    blocks: Tensor
    positions: Tensor
    places: Tensor
    limits: Tensor
    extra: Tensor | None = None
    is_prompt_start: bool = False
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    @property
    def windows(self) -> list[int | None]:
        """The attention windows that layers have asked for, None first."""
        return sorted({window for window, _ in self._masks}, key=lambda window: window or 0)

    def mask(self, window: int | None, copies: int, like: Tensor, block_size: int) -> Tensor:
        """Return the additive mask [rows, 1, copies * length, context], built once per window and forward pass."""
        key = (window, copies)
        if key not in self._masks:
            context = self.blocks.shape[1] * block_size
            mask = additive_mask(context, self.positions, self.limits, self.extra, window, like.dtype)
            self._masks[key] = mask if copies == 1 else mask.repeat(1, 1, copies, 1)
        return self._masks[key]


def additive_mask(
    context: int, positions: Tensor, limits: Tensor, extra: Tensor | None, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return [rows, 1, length, context], 0 where a token sees a place and -inf elsewhere; see `Group`."""
    places = torch.arange(context, device=limits.device)
    visible = places < limits.unsqueeze(-1)
    if extra is not None:
        visible = visible.scatter(-1, extra, True)
    if window is not None:
        visible = visible & (places > positions.unsqueeze(-1) - window)
    return torch.where(visible, 0.0, float("-inf")).to(dtype).unsqueeze(1)


def slots_of(blocks: Tensor, places: Tensor, block_size: int) -> Tensor:
    """Return the slots [rows, length] of places; 0 for padding, and for places that the tables do not reach."""
    index = places // block_size
    slots = blocks.gather(1, index.clamp(0, blocks.shape[1] - 1)) * block_size + places % block_size
    return torch.where((places < 0) | (index >= blocks.shape[1]), 0, slots)


@dataclass(slots=True)
class PagedContext:
    """What the attention function needs of one forward pass."""

    kv: KVTensors
    groups: list[Group]
    _slots: Tensor | None = None

    @property
    def slots(self) -> Tensor:
        """Where new keys and values go, [tokens]."""
        if self._slots is None:
            size = self.kv.block_size
            self._slots = torch.cat([slots_of(group.blocks, group.places, size).flatten() for group in self.groups])
        return self._slots


@dataclass(slots=True)
class TracedContext:
    """What the attention function needs while it is traced for compiling: one group, as tensors only.

    Attributes:
        slots: [rows * length]; blocks: [rows, width].
        ends: [rows, length] the place behind the last that each token sees.
        masks: [rows, 1, length, context] additive, by window.
    """

    keys: list[Tensor]
    values: list[Tensor]
    slots: Tensor
    blocks: Tensor
    ends: Tensor
    masks: dict[int | None, Tensor]
    _copied: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, copies: int) -> Tensor:
        """Return [rows, 1, copies * length, context], copied once for all layers: for a prompt that is many bytes."""
        key = (window, copies)
        if key not in self._copied:
            self._copied[key] = self.masks[window].repeat(1, 1, copies, 1)
        return self._copied[key]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write this pass's keys and values to their slots, then attend group by group.

    Args:
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim].

    Returns:
        [1, tokens, heads, head_dim], and no weights.

    Raises:
        ModelError: the layer asks for a feature this function does not compute.
    """
    strange = sorted(name for name in kwargs.keys() - _UNDERSTOOD if kwargs[name] is not None)
    if strange or attention_mask is not None or kwargs.get("dropout"):
        raise ModelError(f"attention with {', '.join(strange) or 'a mask or dropout'} is not supported")
    paged: PagedContext | TracedContext = kwargs["paged"]
    window: int | None = kwargs.get("sliding_window")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(paged, TracedContext):
        return _traced_attention(paged, layer, query, key, value, window, scaling), None
    keys, values = paged.kv.keys[layer], paged.kv.values[layer]
    keys.view(-1, *keys.shape[2:]).index_copy_(0, paged.slots, key[0].transpose(0, 1))
    values.view(-1, *values.shape[2:]).index_copy_(0, paged.slots, value[0].transpose(0, 1))
    outputs = []
    for group in paged.groups:
        stop = group.start + group.rows * group.length
        queries = query[0, :, group.start : stop]
        if group.is_prompt_start and (window is None or group.length <= window):
            own = slice(group.start, stop)
            outputs.append(_attend_to_self(queries, key[0, :, own], value[0, :, own], scaling))
        else:
            outputs.append(_attend_to_gathered(group, queries, keys, values, window, scaling))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.unsqueeze(0), None


def _traced_attention(
    context: TracedContext,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Do the same for one group, without a decision that depends on a number. Returns [1, tokens, heads, d]."""
    keys, values = context.keys[layer], context.values[layer]
    keys.view(-1, *keys.shape[2:]).index_copy_(0, context.slots, key[0].transpose(0, 1))
    values.view(-1, *values.shape[2:]).index_copy_(0, context.slots, value[0].transpose(0, 1))
    mask = context.masks[window]
    if suits(query.shape[-1], query.dtype):
        cache = (keys, values, context.blocks, context.ends)
        return attend_to_blocks(query[0].transpose(0, 1), *cache, mask, scaling).unsqueeze(0)
    rows, _, length, _ = mask.shape
    mask = context.mask(window, query.shape[1] // keys.shape[2])
    # By rows of blocks, not flat: the compiler would divide to find each number's row again.
    read = (keys[context.blocks], values[context.blocks])
    return attend(rows, length, query[0], *read, mask, scaling).unsqueeze(0)


def _attend_to_self(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention of a prompt's first chunk: nothing to gather. [heads, n, d] -> [n, heads, d]."""
    copies = query.shape[0] // key.shape[0]
    if copies > 1:
        key, value = key.repeat_interleave(copies, 0), value.repeat_interleave(copies, 0)
    output = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, scale=scaling)
    return output[0].transpose(0, 1)


def _attend_to_gathered(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """Attention over a group's blocks. [heads, rows * length, d] -> [rows * length, heads, d]."""
    copies = query.shape[0] // keys.shape[2]
    mask = group.mask(window, copies, query, keys.shape[1])
    blocks = group.blocks.flatten()
    key, value = keys.index_select(0, blocks), values.index_select(0, blocks)
    return attend(group.rows, group.length, query, key, value, mask, scaling)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
