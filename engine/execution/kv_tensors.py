"""KVTensors: the keys and values of every layer in blocks, and what else a cache holds."""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from engine.execution.forward_row import ForwardRow
from engine.models.layers.layer_attention import KVShape
from engine.protocols import SlotRow

FP8 = torch.float8_e4m3fn
Sizes = tuple[int, int, int]
"""Heads of a layer's cache, key size and value size."""
FP8_MAX = torch.finfo(FP8).max
"""Larger keys and values become this."""


class PassExtras:
    """What a kind of cache adds to passes; a cache of keys and values alone adds nothing.

    Attributes:
        cuts_rows: whether a group's long row may become several rows.
        num_slots: slots for requests beside their blocks, including slot 0, which no request gets.
    """

    cuts_rows = True
    num_slots = 0

    def begin(self, rows: Sequence[ForwardRow], kv: "KVTensors", *, carries: bool) -> tuple[Sequence[ForwardRow], Any]:
        """Return the rows to compute token by token, and the `ForwardBatch.added` of their pass.

        If the pass `carries`, it hands its states to the next passes, and leaves the slots unchanged.
        """
        return rows, None

    def of_group(self, rows: Sequence[ForwardRow], members: Sequence[int], length: int, added: Any) -> Any:
        """Return the `Group.added` of rows padded to `length`; `members` are their indices in the pass."""
        return None

    def of_next(self, lengths: Sequence[int], added: Any) -> Any:
        """Return the `Group.added` of passes that append a token each; `added` is the last pass's."""
        return None

    def num_tokens(self, _added: Any) -> int:
        """Return how many tokens a pass computes beside its groups."""
        return 0

    def first_layers(self, _count: int) -> "PassExtras":
        """Return the extras of a model's first layers, of which `count` need slots."""
        return self

    def keep_path(self, row: SlotRow, path: Sequence[int]) -> None:
        """Move a slot's entries of accepted nodes, root first, to the places of a chain's tokens."""


class KVTensors:
    """Keys and values of all layers, each [num_blocks, block_size, kv_heads, key_dim or value_dim].

    Attributes:
        has_stacks: whether layers of equal size share a tensor, so that one operator moves all their slots. Passes
            compiled for CPUs would copy such tensors, because they write in place only to separate memory.
        input_device: where batches and draws for this cache are made.
        states: [num_blocks, block_size, state_size] a state per token; None in a cache without `added_shape`.
    """

    has_stacks: ClassVar[bool] = False
    extras = PassExtras()

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        like: Tensor,
        added_shape: KVShape | None = None,
        states_like: Tensor | None = None,
    ) -> None:
        """Allocate zeros: a masked entry is multiplied by a weight of 0, and 0 * nan is nan.

        Args:
            like: has the dtype and the device of keys and values.
            added_shape: layers that follow the model's; see `CausalLM.added_to_cache`.
            states_like: [state_size] has the dtype and the device of a token's state.
        """
        self.block_size = block_size
        self.input_device = like.device
        blocks = (num_blocks, block_size)
        self._stacked: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._sizes, added_sizes = shape.sizes, added_shape.sizes if added_shape else ()
        for sizes in (self._sizes, added_sizes):
            unused: dict[Sizes, list[tuple[Tensor, ...]]] = {layer_sizes: [] for layer_sizes in sizes}
            for layer_sizes, count in self._stacks(sizes):
                heads, *dims = layer_sizes
                stacks = [like.new_zeros((count, *blocks, heads, dim)) for dim in dims]
                self._stacked += stacks
                unused[layer_sizes] += zip(*stacks, strict=True)
            for layer_sizes in sizes:
                key, value = unused[layer_sizes].pop(0)
                self.keys.append(key)
                self.values.append(value)
        self._num_own = 2 * len(self._stacks(self._sizes))
        self.states = None if states_like is None else states_like.new_zeros((*blocks, *states_like.shape))
        if self.states is not None:
            self._stacked.append(self.states[None, :, :, None])

    def _stacks(self, sizes: Sequence[Sizes]) -> list[tuple[Sizes, int]]:
        """Return each tensor's layer size and number of layers, in the order of `_stacked`."""
        return [*Counter(sizes).items()] if self.has_stacks else [(layer_sizes, 1) for layer_sizes in sizes]

    def first_layers(self, count: int, num_with_slots: int = 0) -> Self:
        """Return the cache of the first layers, in the same memory; states are in it only with all layers.

        Args:
            count: layers with keys and values.
            num_with_slots: layers with tensors in slots.
        """
        view = copy.copy(self)
        view.extras = self.extras.first_layers(num_with_slots)
        if count < len(self.keys):
            view.keys, view.values, view.states = self.keys[:count], self.values[:count], None
            counts = [number for _, number in self._stacks(self._sizes[:count]) for _ in range(2)]
            view._stacked = [caches[:number] for caches, number in zip(self._stacked, counts, strict=False)]
        return view

    @property
    def added(self) -> list[Tensor]:
        """The added layers' keys, values and states, [layers, num_blocks, block_size, heads, dim]; empty without."""
        return self._stacked[self._num_own :]

    def slot(self, block_ids: Sequence[int], place: int) -> int:
        """Return the slot of a place in the context of a request with these blocks."""
        block, offset = divmod(place, self.block_size)
        return block_ids[block] * self.block_size + offset

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` to `targets` in all layers at once, to keep a draft's accepted path."""
        device = self._stacked[0].device
        index = torch.tensor([sources, targets], dtype=torch.int64, pin_memory=device.type == "cuda")
        index = index.to(device, non_blocking=True)
        for caches in self._stacked:
            slots = as_bytes(caches).flatten(1, 2)
            slots.index_copy_(1, index[1], slots.index_select(1, index[0]))


def slots_of(blocks: Tensor, places: Tensor, block_size: int) -> Tensor:
    """Return the slots [rows, length] of places; 0 for padding and for places beyond the block tables."""
    index = places // block_size
    slots = blocks.gather(1, index.clamp(0, blocks.shape[1] - 1)) * block_size + places % block_size
    return torch.where((places < 0) | (index >= blocks.shape[1]), 0, slots)


def stored(kv: KVTensors, layer: int) -> tuple[Tensor, Tensor]:
    """Return a layer's cached keys and values; they are the same if only keys are stored."""
    keys, values = kv.keys[layer], kv.values[layer]
    return keys, values if values.shape[-1] else keys


def write_slots(cache: Tensor, slots: Tensor, entries: Tensor) -> None:
    """Write [kv_heads, tokens, head_dim] entries to the slots [tokens] of one layer's keys or values."""
    if cache.dtype == FP8:
        entries = entries.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    as_bytes(cache).view(-1, *cache.shape[2:]).index_copy_(0, slots, as_bytes(entries).transpose(0, 1))


def as_bytes(cache: Tensor) -> Tensor:
    """Return fp8 numbers as bytes, because torch does not index them everywhere."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache
