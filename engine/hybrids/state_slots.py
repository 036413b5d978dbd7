"""StateSlots: allocates slots for the states of linear layers, and caches states at boundaries of prefixes.

A state cannot be cut to a shorter context, as keys and values can. Each running request owns a slot, which its rows
overwrite. Copies are saved at *boundaries*, multiples of both the block size and the chunk length: at the prompt's last
boundary, at the last boundary that the prompt shares with cached blocks, and at the output's newest boundary. A cached
prefix is usable up to the deepest boundary that has blocks and a state.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.blocks.block_pool import BlockPool
from engine.blocks.row_extras import RowExtras
from engine.config import EngineConfig, ModelInfo
from engine.protocols import Request, ScheduledRow, SlotRow


@dataclass(slots=True)
class _Held:
    """The slots of a running request.

    Attributes:
        slot: the slot that its rows overwrite.
        source: the slot from which its next row starts, with the state after `place` tokens.
        shared: the tokens of its cached blocks at admission, up to the last boundary.
        row: the row of the round in flight.
        newest: the slot and digest of the output's newest saved state.
    """

    slot: int
    source: int
    place: int
    shared: int
    row: ScheduledRow | None = None
    newest: tuple[int, bytes] | None = None

    @property
    def borrowed(self) -> list[int]:
        """The referenced slots besides `slot`: a cached source, and the slots of saved states."""
        saves = self.row.slot.saves if self.row is not None and self.row.slot is not None else ()
        return [self.source] * (self.source not in (0, self.slot)) + [slot for _, slot in saves]


class StateSlots(BlockPool, RowExtras):
    """The slots of a target with linear layers; each holds a state and `num_speculative_tokens` updates."""

    drafts_beyond_plan = False

    def __init__(self, config: EngineConfig, target: ModelInfo) -> None:
        assert config.num_states is not None, "num_states is planned first"
        self._chunk, self.slots = target.state_chunk, self
        size = math.lcm(config.block_size, self._chunk)
        super().__init__(1 + config.num_states, size, share=config.enable_prefix_caching)
        self._kv_block_size = config.block_size
        self._held: dict[int, _Held] = {}  # by the request's identity, oldest first

    def is_unsure(self, request: Request) -> bool:
        """Return whether a request's last round was lost, so that its slot's state is unknown."""
        held = self._held.get(id(request))
        return held is not None and held.row is not None

    def admit(self, request: Request, digests: Sequence[bytes]) -> int | None:
        """Take a slot for a request, and the deepest cached state of its cached blocks (`digests`).

        Returns the number of usable blocks, or None if no slot is free.
        """
        step = self.block_size // self._kv_block_size
        num_blocks = len(digests) // step * step
        shared, source = num_blocks * self._kv_block_size, None
        while num_blocks and (source := self.take(digests[num_blocks - 1])) is None:
            num_blocks -= step
        new_slots = self.allocate(1)
        if new_slots is None and source is not None:  # `source` may be the last free slot, and no other may become free
            self.free([source])
            num_blocks, source = 0, None
            new_slots = self.allocate(1)
        if new_slots is None:
            return None
        place = num_blocks * self._kv_block_size
        self._held[id(request)] = _Held(new_slots[0], source or 0, place, shared)
        return num_blocks

    def release(self, request: Request) -> None:
        """Free a request's slots, if it has any; states saved by its round in flight are not published."""
        if (held := self._held.pop(id(request), None)) is not None:
            self.free([held.slot, *held.borrowed])

    def row_length(self, request: Request, start: int, length: int) -> int:
        """Return the length of a row of at most `length` tokens, which inside the prompt ends with a chunk.

        At least one chunk is computed, so that a small budget does not move the ends of chunks.
        """
        if start + length >= request.prompt_length:
            return length
        end = (start + length) // self._chunk * self._chunk
        return max(end, min(start + self._chunk, request.prompt_length)) - start

    def assign(self, rows: list[ScheduledRow]) -> None:
        """Set the slot of each row of the next round, and reserve slots for the states that it saves."""
        for row in rows:
            held = self._held[id(row.request)]
            saves = tuple(self._saves(row, held)) if self._share else ()
            row.slot, held.row = SlotRow(held.slot, held.source, row.start - held.place, saves), row

    def commit(self, request: Request, digests: Sequence[bytes]) -> None:
        """Publish the states that a request's row has saved; `digests` are of its computed blocks."""
        held = self._held.get(id(request))
        if held is None or held.row is None or held.row.slot is None:
            return
        for place, slot in held.row.slot.saves:
            digest = digests[place // self._kv_block_size - 1]
            self.publish(slot, digest)
            if place > self._last_of_prompt(request):
                if held.newest is not None:
                    self.forget(*held.newest)
                held.newest = slot, digest
        self.free(held.borrowed)
        held.source, held.place, held.row = held.slot, held.row.start + held.row.length, None

    def _saves(self, row: ScheduledRow, held: _Held) -> Iterator[tuple[int, int]]:
        end, last = row.start + row.length, self._last_of_prompt(row.request)
        newest = end // self.block_size * self.block_size
        for place in sorted({min(held.shared, last), last, max(newest, last)}):
            if held.place < place <= end and (slots := self.allocate(1)):
                yield place, slots[0]

    def _last_of_prompt(self, request: Request) -> int:
        """Return the last boundary that the same prompt can use again: at least one token must be computed."""
        return (request.prompt_length - 1) // self.block_size * self.block_size
