"""TracedContext: attention as it is traced for compiling, without a decision that depends on a number."""

from dataclasses import dataclass, field

from torch import Tensor

from engine.execution.attention import attend_to_gathered, write_slots
from engine.execution.cpu.paged_attention import attend_to_blocks, suits


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

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
    ) -> Tensor:
        """Write, then attend; see `AttentionContext.attend`."""
        keys, values = self.keys[layer], self.values[layer]
        write_slots(keys, self.slots, key)
        write_slots(values, self.slots, value)
        mask = self.masks[window]
        if suits(query.shape[-1], query.dtype):
            return attend_to_blocks(query.transpose(0, 1), keys, values, self.blocks, self.ends, mask, scaling)
        rows, _, length, _ = mask.shape
        mask = self.mask(window, query.shape[0] // keys.shape[2])
        # By rows of blocks, not flat: the compiler would divide to find each number's row again.
        return attend_to_gathered(rows, length, query, keys[self.blocks], values[self.blocks], mask, scaling)
