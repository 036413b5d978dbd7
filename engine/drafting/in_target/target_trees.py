"""TargetTreeDrafter: best-first trees of a trained head in the target's process.

As with chains, nothing is kept between rounds but what is learned: a node is computed in a place behind the tip, in the
row's own blocks, and the verification pass overwrites the places of the nodes that are drafted.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.block_table import block_table
from engine.config import EngineConfig
from engine.drafting.in_target.target_chains import TargetChainDrafter, with_drafts
from engine.drafting.model.draft_cache import CachedPrefix, DraftCache
from engine.drafting.model.next_tokens import NUM_CANDIDATES
from engine.drafting.model.tree_drafter import TreeDrafter
from engine.errors import ModelError
from engine.execution.attention import KVTensors
from engine.execution.backend import Backend, Part
from engine.protocols import ProposeRow, VerifyRow
from engine.sampling.grammar import Grammars


class RowBlocks(DraftCache):
    """The blocks of a round's rows, all in the target's cache; none are free, so a tree has the room that its row has.

    Attributes:
        prefixes: per request, its row's block table.
    """

    def __init__(self, kv: KVTensors) -> None:
        self.kv = kv
        self.free_blocks = []
        self.prefixes = OrderedDict()

    def hold(self, rows: Sequence[VerifyRow]) -> None:
        """Take the block tables of a round."""
        tables = ((row.request.request_id, block_table(row.block_ids)) for row in rows)
        self.prefixes = OrderedDict((name, CachedPrefix(block_ids=blocks)) for name, blocks in tables)


class TargetTreeDrafter(TreeDrafter):
    """Drafts trees in the target's process; see `TargetDrafter`. All ranks grow the trees of the deciding rank."""

    def __init__(
        self, part: Part, config: EngineConfig, backend: Backend, kv: KVTensors, grammars: Grammars | None = None
    ) -> None:
        """Draft with a head that drafts one token a pass.

        Raises:
            ModelError: the head drafts blocks.
        """
        if backend.model.head is not None and backend.model.head.drafts_blocks:
            raise ModelError(f"drafting is 'head_tree', but the head of {backend.info.name} drafts blocks, no trees")
        self._in_target = TargetChainDrafter(part, config, backend, kv, grammars, num_ranked=NUM_CANDIDATES)
        self._blocks = RowBlocks(self._in_target.kv)
        super().__init__(self._in_target.draft_model, config, self._blocks, self._in_target)

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        """Grow trees for the rows whose drafts were left to the target; see `TargetDrafter.draft`."""
        self._in_target.decides = decides
        able = self._in_target.able(rows)
        self._blocks.hold(able)
        sent, self._sent = self._sent, {}
        for row in able:
            if (tree := sent.get(row.request.request_id)) is not None:
                self.follow(row.request, tree)
        if not able:
            return with_drafts(rows, [], [])
        planned = [ProposeRow(row.request, row.draft.num_deferred) for row in able]
        trees = self.grow(planned, self._in_target.tips(able))
        self._sent = {row.request.request_id: tree for row, tree in zip(able, trees, strict=True)}
        return with_drafts(rows, able, [tree.draft() for tree in trees])
