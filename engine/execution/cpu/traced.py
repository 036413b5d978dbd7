"""TracedContext: attention for compiling, without branches that depend on tensor values."""

from dataclasses import dataclass, field

from torch import Tensor

from engine.execution.attention import write_slots
from engine.execution.cpu.paged_attention import attend_to_blocks, suits
from engine.execution.dot_product import AttentionParams, attend_to_gathered


@dataclass(slots=True)
class TracedContext:
    """The context of the attention function while it is traced: one group, as tensors only.

    Attributes:
        slots: [rows * length]; blocks: [rows, width].
        ends: [rows, length] each token attends to places before its end only.
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
        """Return the mask [rows, 1, copies * length, context], copied once for all layers because it is large."""
        key = (window, copies)
        if key not in self._copied:
            self._copied[key] = self.masks[window].repeat(1, 1, copies, 1)
        return self._copied[key]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write, then attend; see `AttentionContext.attend`."""
        keys, values = self.keys[layer], self.values[layer]
        write_slots(keys, self.slots, key)
        write_slots(values, self.slots, value)
        mask = self.masks[params.window]
        if params.is_plain and key.shape[-1] == value.shape[-1] and suits(query.shape[-1], query.dtype):
            return attend_to_blocks(query.transpose(0, 1), keys, values, self.blocks, self.ends, mask, params.scaling)
        rows, _, length, _ = mask.shape
        mask = self.mask(params.window, query.shape[0] // keys.shape[2])
        # Indexed by rows of blocks: with flat indices, the compiled code would divide to find each number's row.
        return attend_to_gathered(rows, length, query, keys[self.blocks], values[self.blocks], mask, params)
