"""Paged attention with tree masks, registered as an attention function of transformers.

`KVTensors` holds the keys and values of every layer in blocks. A forward pass is a flat sequence of tokens in groups:
one group of all short rows (decoding and drafts, padded to one length), and one per prefill chunk. Each group has its
block tables and its mask. The function's name is not in transformers' mask registry, so that transformers builds no
mask itself.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.errors import ModelError
from engine.execution.dot_product import AttentionParams, attend_to_gathered, attend_to_self

ATTENTION_NAME = "paceline"
_SUPPORTED = {
    "sliding_window",
    "softcap",
    "s_aux",
    "dropout",
    "position_ids",
    "paged",
    "is_causal",
    "use_cache",
    "output_attentions",
    "output_router_logits",
}


class KVShape(NamedTuple):
    """What a KV cache holds per token: in each layer, for each key/value head, a key and a value of these sizes."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int


class KVTensors:
    """Keys and values of all layers, each [num_blocks, block_size, kv_heads, key_dim or value_dim].

    Attributes:
        input_device: where batches and draws for this cache are made; a backend may copy them itself.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, like: Tensor) -> None:
        blocks = (num_blocks, block_size, shape.kv_heads)
        self.block_size = block_size
        self.input_device = like.device
        # Zeros, because a masked entry is multiplied by a weight of 0, and 0 * nan is nan.
        self.keys, self.values = (
            [torch.zeros((*blocks, dim), dtype=like.dtype, device=like.device) for _ in range(shape.layers)]
            for dim in (shape.key_dim, shape.value_dim)
        )

    def of_layers(self, layers: Sequence[int]) -> Self:
        """Return the cache that holds some of the layers, in this order, in the same memory."""
        view = copy.copy(self)
        view.keys, view.values = ([caches[layer] for layer in layers] for caches in (self.keys, self.values))
        return view

    def slot(self, block_ids: Sequence[int], place: int) -> int:
        """Return the slot of a place in the context of a request with these blocks."""
        block, offset = divmod(place, self.block_size)
        return block_ids[block] * self.block_size + offset

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` to `targets` in every layer, to keep an accepted path of a tree."""
        index = torch.tensor([sources, targets], dtype=torch.int64, device=self.keys[0].device)
        for cache in (*self.keys, *self.values):
            slots = cache.view(-1, *cache.shape[2:])
            slots[index[1]] = slots[index[0]]


@dataclass(slots=True)
class Group:
    """Rows of one forward pass that share a query length.

    Attributes:
        start: index of the group's first token in the batch.
        rows: how many rows.
        length: tokens per row, padding included.
        blocks: [rows, width] the block tables.
        positions: [rows, length] for the rotary embedding.
        places: [rows, length] index in the row's context of each token's keys and values; -1 is padding (block 0).
        limits: [rows, length] each token attends to the places before its limit.
        extra: [rows, length, x] more places that each token attends to, for trees; None for chains. A window
            never hides these places, so it must be longer than the tree is deep.
        is_prompt_start: whether the group is the first chunk of one prompt, without cached tokens before it.
        encoder_lengths: [rows] how many of each row's first places hold an encoder's tokens: only cross-attention sees
            them, and it sees nothing else. None for a decoder-only model.
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
    encoder_lengths: Tensor | None = None
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    _cross_mask: Tensor | None = None
    _biased_mask: tuple[Tensor, Tensor] | None = None

    @property
    def windows(self) -> list[int | None]:
        """The attention windows that layers used in this pass, None first."""
        return sorted({window for window, _ in self._masks}, key=lambda window: window or 0)

    def mask(self, window: int | None, copies: int, like: Tensor, block_size: int) -> Tensor:
        """Return the additive mask [rows, 1, copies * length, context], cached per window for the forward pass."""
        key = (window, copies)
        if key not in self._masks:
            context = self.blocks.shape[1] * block_size
            mask = additive_mask(context, self.positions, self.limits, self.extra, window, like.dtype)
            self._masks[key] = mask if copies == 1 else mask.repeat(1, 1, copies, 1)
        return self._masks[key]

    def cross_mask(self, like: Tensor, block_size: int) -> Tensor:
        """Return the additive mask [rows, 1, 1, context] that shows an encoder's tokens only."""
        assert self.encoder_lengths is not None
        if self._cross_mask is None:
            places = torch.arange(self.blocks.shape[1] * block_size, device=self.blocks.device)
            visible = places < self.encoder_lengths.unsqueeze(-1)
            self._cross_mask = torch.where(visible, 0.0, float("-inf")).to(like.dtype)[:, None, None]
        return self._cross_mask

    def biased_mask(self, bias: Tensor, block_size: int) -> Tensor:
        """Return the additive mask [rows, heads, length, context] of a decoder's own tokens; see `AttentionParams`.

        The rows are chains: a token's place is the last that it attends to. Layers that share a bias share the mask.
        Only the last one is kept, because it is large and every layer may have a bias of its own.
        """
        assert self.encoder_lengths is not None
        if self._biased_mask is None or self._biased_mask[0] is not bias:
            self._biased_mask = None
            places = torch.arange(self.blocks.shape[1] * block_size, device=self.limits.device)
            distances = self.limits.unsqueeze(-1) - 1 - places
            visible = (distances >= 0) & (places >= self.encoder_lengths[:, None, None])
            scores = bias[:, distances.clamp(0, bias.shape[1] - 1)].transpose(0, 1)
            self._biased_mask = bias, scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
        return self._biased_mask[1]


def additive_mask(
    context: int, positions: Tensor, limits: Tensor, extra: Tensor | None, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return [rows, 1, length, context], 0 where a token attends to a place, else -inf; see `Group`."""
    places = torch.arange(context, device=limits.device)
    visible = places < limits.unsqueeze(-1)
    if extra is not None:
        visible = visible.scatter(-1, extra, True)
    if window is not None:
        visible = visible & (places > positions.unsqueeze(-1) - window)
    return torch.where(visible, 0.0, float("-inf")).to(dtype).unsqueeze(1)


def slots_of(blocks: Tensor, places: Tensor, block_size: int) -> Tensor:
    """Return the slots [rows, length] of places; 0 for padding and for places beyond the block tables."""
    index = places // block_size
    slots = blocks.gather(1, index.clamp(0, blocks.shape[1] - 1)) * block_size + places % block_size
    return torch.where((places < 0) | (index >= blocks.shape[1]), 0, slots)


class AttentionContext(Protocol):
    """What the attention function needs in one forward pass; backends implement it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write a layer's new keys and values to their slots, then attend.

        Args:
            query: [heads, tokens, key_dim].
            key: [kv_heads, tokens, key_dim].
            value: [kv_heads, tokens, value_dim].

        Returns:
            [tokens, heads, value_dim].
        """
        ...


@dataclass(slots=True)
class PagedContext:
    """The context of eager passes: attends group by group with torch's operators.

    Attributes:
        layers: the layers that have attended so far, in order.
    """

    kv: KVTensors
    groups: list[Group]
    _slots: Tensor | None = None
    layers: list[int] = field(default_factory=list)

    @property
    def slots(self) -> Tensor:
        """The slots of the batch's keys and values, [tokens]."""
        if self._slots is None:
            size = self.kv.block_size
            self._slots = torch.cat([slots_of(group.blocks, group.places, size).flatten() for group in self.groups])
        return self._slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write, then attend; see `AttentionContext.attend`."""
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        if not params.is_cross:
            self.layers.append(layer)
            write_slots(keys, self.slots, key)
            write_slots(values, self.slots, value)
        outputs = []
        for group in self.groups:
            tokens = slice(group.start, group.start + group.rows * group.length)
            sees_all = params.window is None or group.length <= params.window
            if group.is_prompt_start and sees_all and params.is_plain:
                output = attend_to_self(query[:, tokens], key[:, tokens], value[:, tokens], params.scaling)
            else:
                output = _attend_to_blocks(group, query[:, tokens], keys, values, params)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def write_slots(cache: Tensor, slots: Tensor, entries: Tensor) -> None:
    """Write [kv_heads, tokens, head_dim] entries to the slots [tokens] of one layer's keys or values."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, entries.transpose(0, 1))


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to their slots, then attend; transformers calls this in every layer.

    Args:
        query: [1, heads, tokens, key_dim].
        key: [1, kv_heads, tokens, key_dim].
        value: [1, kv_heads, tokens, value_dim].

    Returns:
        [1, tokens, heads, value_dim], and None for the attention weights.

    Raises:
        ModelError: the layer needs an attention feature that is not supported.
    """
    unsupported = sorted(name for name in kwargs.keys() - _SUPPORTED if kwargs[name] is not None)
    if unsupported or attention_mask is not None or kwargs.get("dropout"):
        raise ModelError(f"attention with {', '.join(unsupported) or 'a mask or dropout'} is not supported")
    if "paged" not in kwargs:
        raise ModelError("its layers do not pass keyword arguments on to their attention")
    context: AttentionContext = kwargs["paged"]
    # Not made an int: while layers are compiled, their index is symbolic.
    layer: int = module.layer_idx  # type: ignore[assignment]
    params = AttentionParams(kwargs.get("sliding_window"), scaling, kwargs.get("softcap"), kwargs.get("s_aux"))
    # Contiguous, because some models view it as [1, tokens, heads * value_dim].
    return context.attend(layer, query[0], key[0], value[0], params).unsqueeze(0).contiguous(), None


def _attend_to_blocks(group: Group, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """Attention over a group's blocks. [heads, rows * length, d] -> [rows * length, heads, d]."""
    copies, block_size = query.shape[0] // keys.shape[2], keys.shape[1]
    if params.is_cross:
        mask = group.cross_mask(query, block_size)
    elif params.bias is not None:
        mask = group.biased_mask(params.bias, block_size)
    else:
        mask = group.mask(params.window, copies, query, block_size)
    blocks = group.blocks.flatten()
    key, value = keys.index_select(0, blocks), values.index_select(0, blocks)
    return attend_to_gathered(group.rows, group.length, query, key, value, mask, params)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
