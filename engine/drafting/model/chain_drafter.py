"""ModelDrafter: a small model drafts a chain for every request of a batch, k forward passes for k tokens."""

from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from engine.drafting.model.draft_cache import DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_cache import make_cache
from engine.drafting.model.token_drawer import Chain, TokenDrawer
from engine.protocols import NO_DRAFT, Draft, ProposeRow, run_in_process


class ModelDrafter:
    """Drafts chains with a model in this process."""

    def __init__(self, draft: DraftModel, config: EngineConfig) -> None:
        """Make the draft's KV cache; the configuration's `num_blocks` must be planned."""
        self.cache = make_cache(draft, config)
        self._drawer = TokenDrawer(draft, self.cache.kv, config)

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        current = {row.request.request_id for row in rows}
        able = [row for row in rows if row.num_draft_tokens and self.cache.make_room(row, [], current)]
        chains = {row.request.request_id: Chain() for row in able}
        if able:
            with torch.inference_mode():
                complete_chains(self._drawer, self.cache, able, list(chains.values()))
        drawn = [chains.get(row.request.request_id) for row in rows]
        return [chain.draft() if chain else NO_DRAFT for chain in drawn]

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
