"""FeatureCache: the cache of a draft that reads the target's features, in a draft worker.

A committed token's state is the target's feature, a draft token's the draft's own guess (see `engine.heads`). Places
that were computed before their features arrived are computed again, once tokens are committed and features are here.
"""

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.drafting.model.draft_cache import CachedPrefix, DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_store import FeatureStore
from engine.execution.backend import Backend
from engine.protocols import ProposeRow


def make_cache(draft: DraftModel, config: EngineConfig) -> DraftCache:
    """Return the cache that a draft model shares with other drafters, or a new cache for the model."""
    if draft.cache is not None:
        return draft.cache
    if draft.features is None:
        return DraftCache(draft.backend, config)
    return FeatureCache(draft.backend, config, draft.features)


class FeatureCache(DraftCache):
    """A draft cache whose rows have room only once the features of all tokens before the last have arrived."""

    def __init__(self, backend: Backend, config: EngineConfig, features: FeatureStore) -> None:
        super().__init__(backend, config)
        self._features = features
        if backend.model.drafts_blocks:
            self._max_tail = 0  # the pass that draws a block computes no token before the last

    def restart(self) -> None:
        for prefix in self.prefixes.values():  # whose features stay in their blocks
            prefix.token_ids, prefix.num_committed, prefix.scratch = [], 0, None

    def trim(self, request_id: str, length: int | None = None) -> None:
        prefix = self.prefixes[request_id]
        kept = len(prefix.token_ids) if length is None else length
        super().trim(request_id, max(kept, prefix.num_features))  # features come once

    def features_of(self, request_id: str, first: int) -> Tensor:
        """Return the features of a request's tokens from place `first` on, as far as they are here, [n, state_size]."""
        prefix, states = self.prefixes.get(request_id, CachedPrefix()), self.kv.states
        assert states is not None
        slots = [self.kv.slot(prefix.block_ids, place) for place in range(first, prefix.num_features)]
        return states.flatten(0, 1)[torch.tensor(slots, dtype=torch.int64, device=states.device)].cpu()

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self._features.forget(request_id)

    @torch.inference_mode()
    def make_room(self, row: ProposeRow, drafted: Sequence[int], current: Container[str]) -> bool:
        """Extend `DraftCache.make_room` by writing the features of a row's context to its blocks; False if any lack."""
        request_id, num_features = row.request.request_id, len(row.request.token_ids) - 1
        states = self.kv.states
        assert states is not None
        if (prefix := self.prefixes.get(request_id)) is not None:
            # A place reads the feature of the place before.
            del prefix.token_ids[self._features.num_taken(request_id) + 1 :]
        if not num_features or not self._features.wait(request_id, num_features):
            return False
        if not super().make_room(row, drafted, current):
            return False
        start, rows = self._features.take(request_id, num_features)
        if rows:
            new = torch.frombuffer(rows, dtype=getattr(torch, self._features.dtype)).view(-1, states.shape[-1])
            prefix = self.prefixes[request_id]
            prefix.num_features = start + len(new)
            slots = [self.kv.slot(prefix.block_ids, place) for place in range(start, start + len(new))]
            states.flatten(0, 1)[torch.tensor(slots, device=states.device)] = new.to(states.device, states.dtype)
        return self._features.num_taken(request_id) == num_features  # not if it was forgotten meanwhile
