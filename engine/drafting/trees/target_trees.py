"""TargetTreeDrafter: best-first trees of a model in the target's process.

As with chains, nodes lie behind the tip in the row's blocks, and the verification pass overwrites them.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.blocks.block_pool import block_table
from engine.config import EngineConfig
from engine.drafting.in_target.target_chains import TargetChainDrafter, with_drafts
from engine.drafting.model.draft_cache import CachedPrefix, DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.next_tokens import NUM_CANDIDATES
from engine.drafting.model.token_drawer import TokenDrawer
from engine.drafting.trees.tree_drafter import TreeDrafter
from engine.execution.backend import Backend, Part
from engine.execution.kv_tensors import KVTensors
from engine.protocols import ProposeRow, VerifyRow
from engine.sampling.grammar import Grammars


class TargetTreeDrafter(TreeDrafter):
    """Drafts trees in the target's process; see `TargetDrafter`. All ranks grow the trees of the deciding rank."""

    def __init__(
        self, part: Part, config: EngineConfig, backend: Backend, kv: KVTensors, grammars: Grammars | None = None
    ) -> None:
        self._in_target = TargetChainDrafter(part, config, backend, kv, grammars, num_ranked=NUM_CANDIDATES)
        super().__init__(self._in_target.draft_model, config)

    def parts(self, draft: DraftModel, config: EngineConfig) -> tuple[DraftCache, TokenDrawer]:
        """Return the target's cache, in which a tree has only the room of its row's blocks, and the drawer."""
        return DraftCache(draft.backend, config, self._in_target.kv), self._in_target

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        self._in_target.decides = decides
        able = self._in_target.able(rows)
        planned = [ProposeRow(row.request, row.draft.num_deferred) for row in able]
        names = [row.request.request_id for row in able]
        last = [(row.request, self.tree_of(row.request.request_id)) for row in planned]
        tables = (CachedPrefix(block_ids=block_table(row.block_ids)) for row in able)
        self.cache.prefixes = OrderedDict(zip(names, tables, strict=True))
        for request, tree in last:
            if tree is not None:
                self.follow(request, tree)
        trees = self.grow(planned, self._in_target.tips(able)) if able else []
        return with_drafts(rows, able, [tree.draft() for tree in trees])
