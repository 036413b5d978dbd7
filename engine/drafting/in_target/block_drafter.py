"""BlockDrafter: drafts in the target's process with a head that predicts several places in one pass."""

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.drafting.in_target.target_chains import with_drafts
from engine.drafting.model.block_drawer import BlockDrawer
from engine.drafting.model.draft_model import DraftModel
from engine.execution.backend import Backend, Part
from engine.execution.kv_tensors import KVTensors
from engine.protocols import VerifyRow
from engine.sampling.grammar import Grammars


class BlockDrafter(BlockDrawer):
    """Drafts blocks; see `TargetDrafter`."""

    def __init__(
        self, part: Part, config: EngineConfig, backend: Backend, kv: KVTensors, grammars: Grammars | None = None
    ) -> None:
        part_backend, seen_kv = backend.beside(part, kv)
        super().__init__(DraftModel(part_backend, grammars=grammars), seen_kv, config, backend.reducer)

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        """Draw chains; see `TargetDrafter.draft`. A row without computed tokens gets no draft."""
        able = [row for row in rows if row.draft.num_deferred and row.start]
        requests, starts = [row.request for row in able], [row.start for row in able]
        tables, counts = [row.block_ids for row in able], [row.draft.num_deferred for row in able]
        chains = self.blocks(requests, starts, tables, counts, decides=decides) if able else []
        return with_drafts(rows, able, [chain.draft() for chain in chains])
