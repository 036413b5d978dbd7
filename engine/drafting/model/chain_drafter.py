"""ModelDrafter: a small model drafts a chain for every request of a batch, k forward passes for k tokens."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from engine.config import EngineConfig
from engine.drafting.model.draft_cache import DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_cache import make_cache
from engine.drafting.model.token_drawer import Chain, TokenDrawer
from engine.protocols import NO_DRAFT, Draft, ProposeRow, run_in_process


class ModelDrafter:
    """Drafts chains with a model in this process."""

    drawer: ClassVar[type[TokenDrawer]] = TokenDrawer

    def __init__(self, draft: DraftModel, config: EngineConfig) -> None:
        """Make the draft's KV cache; the configuration's `num_blocks` must be planned."""
        self.cache = make_cache(draft, config)
        self._drawer = self.drawer(draft, self.cache.kv, config)

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        current = {row.request.request_id for row in rows}
        able = [row for row in rows if row.num_draft_tokens and self.cache.make_room(row, [], current)]
        with torch.inference_mode():
            chains = self._draw(able) if able else []
        drafts = {row.request.request_id: chain.draft() for row, chain in zip(able, chains, strict=True)}
        return [drafts.get(row.request.request_id, NO_DRAFT) for row in rows]

    def _draw(self, rows: Sequence[ProposeRow]) -> list[Chain]:
        chains = [Chain() for _ in rows]
        complete_chains(self._drawer, self.cache, rows, chains)
        return chains

    def release(self, request_id: str) -> None:
        self.cache.release(request_id)
        self._drawer.release(request_id)


def complete_chains(
    drawer: TokenDrawer, cache: DraftCache, rows: Sequence[ProposeRow], chains: Sequence[Chain]
) -> None:
    """Draw until every row's chain has `num_draft_tokens` tokens; each lacks at least one token."""
    requests = [row.request for row in rows]
    prefixes = [cache.prefixes[request.request_id] for request in requests]
    counts = [row.num_draft_tokens - len(chain.token_ids) for row, chain in zip(rows, chains, strict=True)]
    batch = run_in_process(cache.catch_up(requests, [chain.token_ids for chain in chains]))
    drawer.extend(batch, requests, [prefix.block_ids for prefix in prefixes], chains, counts)
    cache.hold(requests, [chain.token_ids[:-1] for chain in chains])  # the last draft token is not computed yet
