"""Paged attention, whose masks let drafts branch.

A forward pass is a flat sequence of tokens in groups: a group of all short rows (decoding and drafts, padded to one
length), and a group per prefill chunk.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.execution.kv_tensors import KVTensors, as_bytes, slots_of, stored, write_slots
from engine.models.layers.layer_attention import AttentionParams

_MAX_PACKED = 32
"""In latent attention, all heads of rows up to this length share one product; longer rows' masks are too large."""


@dataclass(slots=True)
class Group:
    """Rows of one forward pass that share a query length.

    Attributes:
        start: index of the group's first token in the batch.
        length: tokens per row, including padding.
        blocks: [rows, width] block tables.
        positions: [rows, length] for the rotary embedding.
        places: [rows, length] index in the row's context of each token's keys and values; -1 is padding (block 0).
        limits: [rows, length] each token attends to the places before its limit.
        extra: [rows, length, x] more places that each token attends to, if drafts branch; None for chains.
            A window must be longer than the draft is deep.
        is_prompt_start: whether the group is the first chunk of a prompt without cached tokens.
        added: what the kind of cache adds to the group; see `PassExtras`.
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
    added: Any = None
    _masks: dict[tuple[int | None, int | None, int, bool, int], Tensor] = field(default_factory=dict)

    def mask(self, params: AttentionParams, copies: int, like: Tensor, block_size: int) -> Tensor:
        """Return the additive mask [rows, 1, copies * length, context], cached for the forward pass."""
        key = (params.window, params.chunk, params.first, params.sees_row, copies)
        if key not in self._masks:
            context = self.blocks.shape[1] * block_size
            limits = self.limits_of(params)
            bounds = params.window, like.dtype, params.first, params.chunk
            mask = additive_mask(context, self.positions, limits, self.extra, *bounds)
            self._masks[key] = mask if copies == 1 else mask.repeat(1, 1, copies, 1)
        return self._masks[key]

    @property
    def tokens(self) -> slice:
        """Indices of the group's tokens in the batch."""
        return slice(self.start, self.start + self.rows * self.length)

    def limits_of(self, params: AttentionParams) -> Tensor:
        """Return each token's limit for a layer, [rows, length]."""
        return self.limits.amax(-1, keepdim=True).expand_as(self.limits) if params.sees_row else self.limits

    @property
    def parents(self) -> Tensor:
        """The place of each token's predecessor, [rows, length]; -1 for a context's first token."""
        before = self.positions - 1
        if self.extra is None:
            return before
        # A node's path ends with its parent and itself; the first node of a path follows the committed tip.
        depths = self.positions - self.limits + 1
        index = (depths - 2).clamp(0, self.extra.shape[-1]).long().unsqueeze(-1)
        nodes = F.pad(self.extra, (0, 1)).gather(-1, index).squeeze(-1)  # in compiled passes, chains have no columns
        return torch.where(depths > 1, nodes, before)


def additive_mask(
    context: int,
    positions: Tensor,
    limits: Tensor,
    extra: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
    first: int = 0,
    chunk: int | None = None,
) -> Tensor:
    """Return [rows, 1, length, context], 0 where a token attends to a place, else -inf; see `Group`."""
    places = torch.arange(context, device=limits.device)
    visible = places < limits.unsqueeze(-1)
    if chunk is not None:
        starts = (positions - positions % chunk).unsqueeze(-1)
        visible = visible & (places >= starts)
        if extra is not None:  # a node's place is not its position: the positions on a path follow the tip's
            path = limits.unsqueeze(-1) + torch.arange(extra.shape[-1], device=extra.device)
            extra = extra.where((path >= starts) & (path <= positions.unsqueeze(-1)), context)
            visible = F.pad(visible, (0, 1)).scatter(-1, extra, True)[..., :-1]
    elif extra is not None:
        visible = visible.scatter(-1, extra, True)
    if first:  # behind the nodes, whose padding is place 0
        visible = visible & (places >= (limits - 1).clamp(max=first).unsqueeze(-1))
    if window is not None:
        visible = visible & (places > positions.unsqueeze(-1) - window)
    return torch.where(visible, 0.0, float("-inf")).to(dtype).unsqueeze(1)


@dataclass(slots=True)
class PagedContext:
    """The context of eager passes, which attends group by group."""

    kv: KVTensors
    groups: list[Group]
    _slots: Tensor | None = None
    layers: list[int] = field(default_factory=list)
    taps: dict[int, Tensor] = field(default_factory=dict)

    @property
    def slots(self) -> Tensor:
        """The slots of the batch's keys and values, [tokens]."""
        if self._slots is None:
            size = self.kv.block_size
            self._slots = torch.cat([slots_of(group.blocks, group.places, size).flatten() for group in self.groups])
        return self._slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write, then attend; see `AttentionContext.attend`."""
        keys, values = stored(self.kv, layer)
        if not params.is_shared:
            self.layers.append(layer)
            self.write(layer, key, value)
        if params.temperature is not None:
            query = self._tempered(query, *params.temperature)
        outputs = []
        for group in self.groups:
            tokens = group.tokens
            sees_all = all(bound is None or group.length <= bound for bound in (params.window, params.chunk))
            is_exact = keys.dtype == key.dtype  # otherwise texts would depend on what is cached
            if group.is_prompt_start and sees_all and params.is_plain and is_exact and not params.first:
                output = attend_to_self(query[:, tokens], key[:, tokens], value[:, tokens], params.scaling)
            else:
                output = _attend_to_blocks(group, query[:, tokens], keys, values, params)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor | None = None) -> None:
        """Write a layer's keys and values to the batch's slots or to `slots` [tokens]; see `AttentionContext`."""
        slots = self.slots if slots is None else slots
        write_slots(self.kv.keys[layer], slots, key)
        if self.kv.values[layer].shape[-1]:
            write_slots(self.kv.values[layer], slots, value)

    def _tempered(self, query: Tensor, length: float, strength: float) -> Tensor:
        positions = torch.cat([group.positions.flatten() for group in self.groups])
        factors = torch.log1p(((positions.float() + 1) / length).floor()) * strength + 1
        return (query * factors.unsqueeze(-1)).to(query.dtype)

    def read_states(self, *, of_parents: bool) -> Tensor:
        """Return states; see `AttentionContext.read_states`."""
        size, slots = self.kv.block_size, self.slots
        if of_parents:
            parents = [slots_of(group.blocks.long(), group.parents.long(), size) for group in self.groups]
            slots = torch.cat([rows.flatten() for rows in parents])
        return self._states.index_select(0, slots)

    def write_states(self, states: Tensor, tokens: Tensor | None = None) -> None:
        """Write states; see `AttentionContext.write_states`."""
        slots = self.slots if tokens is None else torch.where(tokens < 0, 0, self.slots[tokens])
        self._states.index_copy_(0, slots.long(), states.to(self._states.dtype))

    @property
    def _states(self) -> Tensor:
        assert self.kv.states is not None, "this cache has no states"
        return self.kv.states.view(-1, self.kv.states.shape[-1])


def _attend_to_blocks(group: Group, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """Attend to blocks: [heads, rows * length, d] -> [rows * length, heads, d]."""
    copies, block_size = query.shape[0] // keys.shape[2], keys.shape[1]
    if is_shared := values is keys and group.length > _MAX_PACKED:
        copies = 1
    if params.masking is not None:
        mask = params.masking(group, query, block_size)
    else:
        mask = group.mask(params, copies, query, block_size)
    blocks = group.blocks.flatten()
    key, value = (as_bytes(cache).index_select(0, blocks).view(cache.dtype).to(query.dtype) for cache in (keys, values))
    if is_shared:
        key, value = (tensor.expand(-1, -1, len(query), -1) for tensor in (key, value))
    return attend_to_gathered(group.rows, group.length, query, key, value, mask, params)


def attend_to_self(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend within a prompt's first chunk, without the KV cache: [heads, n, d] -> [n, heads, d]."""
    copies = query.shape[0] // key.shape[0]
    if copies > 1:  # a view for one kv head, else a copy
        key, value = (tensor.unsqueeze(1).expand(-1, copies, -1, -1).flatten(0, 1) for tensor in (key, value))
    output = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, scale=scaling)
    return output[0].transpose(0, 1)


def attend_to_gathered(
    rows: int, length: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams
) -> Tensor:
    """Attend to gathered blocks; the query heads of a kv head become more queries, so that keys are not copied.

    Args:
        query: [heads, rows * length, d].
        key: the rows' blocks in order, [..., kv_heads, d].
        value: likewise; its d may differ, and is the output's.
        mask: [rows, 1, copies * length, context].

    Returns:
        [rows * length, heads, d].
    """
    heads, _, head_dim = query.shape
    kv_heads, value_dim = value.shape[-2:]
    copies = heads // kv_heads
    context = (rows, mask.shape[-1], kv_heads)
    key, value = key.view(*context, head_dim).transpose(1, 2), value.view(*context, value_dim).transpose(1, 2)
    # [kv_heads, copies, rows, length, d] -> [rows, kv_heads, copies * length, d]
    query = query.view(kv_heads, copies, rows, length, head_dim).permute(2, 0, 1, 3, 4)
    query = query.reshape(rows, kv_heads, copies * length, head_dim)
    if params.is_plain:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=params.scaling)
    else:
        sinks = None if params.sinks is None else params.sinks.view(kv_heads, copies).repeat_interleave(length, -1)
        output = _attend(query, key, value, mask, params._replace(sinks=sinks))
    output = output.view(rows, kv_heads, copies, length, value_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(rows * length, heads, value_dim)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Attend with a soft cap or sinks [kv_heads, queries], which torch lacks; query: [rows, kv_heads, n, d]."""
    scale = query.shape[-1] ** -0.5 if params.scaling is None else params.scaling
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores + mask
    if params.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = params.sinks.float()[None, :, :, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
