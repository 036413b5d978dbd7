"""BlockModelDrafter: a head that predicts several places in one pass drafts apart from its target."""

from collections.abc import Sequence
from typing import ClassVar, cast

from engine.drafting.model.block_drawer import BlockDrawer
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.token_drawer import Chain, TokenDrawer
from engine.protocols import ProposeRow


class BlockModelDrafter(ModelDrafter):
    """Drafts blocks; its cache holds committed tokens only, since what a block writes are guesses."""

    drawer: ClassVar[type[TokenDrawer]] = BlockDrawer

    def _draw(self, rows: Sequence[ProposeRow]) -> list[Chain]:
        requests, counts = [row.request for row in rows], [row.num_draft_tokens for row in rows]
        while self.cache.compute_chunk(requests):
            pass
        prefixes = [self.cache.prefixes[request.request_id] for request in requests]
        starts, tables = [len(prefix.token_ids) for prefix in prefixes], [prefix.block_ids for prefix in prefixes]
        return cast("BlockDrawer", self._drawer).blocks(requests, starts, tables, counts)
