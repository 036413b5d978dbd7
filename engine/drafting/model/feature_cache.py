"""FeatureCache: the cache of a head on a draft worker, with the target's features that the head reads.

The key and value of place p come from token p and the state at place p - 1 (see `KVTensors.states`). Of a committed
token that state is the target's feature, of a draft token the head's own guess. So what a draft computed counts only up
to the place after the last feature; later places are computed again, once the tokens there are committed and their
features have arrived.
"""

from collections.abc import Container, Sequence

import torch

from engine.config import EngineConfig
from engine.drafting.model.draft_cache import CachedPrefix, DraftCache
from engine.drafting.model.feature_store import FeatureStore
from engine.execution.backend import Backend
from engine.protocols import ProposeRow


class FeatureCache(DraftCache):
    """A draft cache whose rows have room only if the features of all tokens before the last one have arrived."""

    def __init__(self, backend: Backend, config: EngineConfig, features: FeatureStore) -> None:
        super().__init__(backend, config)
        self._features = features

    def release(self, request_id: str) -> None:
        """Free a request's blocks, and forget its features: what the blocks held must be sent again."""
        super().release(request_id)
        self._features.forget(request_id)

    def make_room(self, row: ProposeRow, drafted: Sequence[int], current: Container[str]) -> bool:
        """As `DraftCache.make_room`; also put the features of a row's context into its blocks, or return False."""
        request_id, num_features = row.request.request_id, len(row.request.token_ids) - 1
        prefix = self.prefixes.get(request_id)
        if prefix is not None:
            del prefix.token_ids[self._features.num_taken(request_id) + 1 :]
        if not num_features or not self._features.wait(request_id, num_features):
            return False
        if not super().make_room(row, drafted, current):
            return False
        self._write(self.prefixes[request_id], *self._features.take(request_id, num_features))
        return self._features.num_taken(request_id) == num_features  # else it was forgotten meanwhile

    def _write(self, prefix: CachedPrefix, start: int, rows: bytearray) -> None:
        if not rows:
            return
        states = self.kv.states.flatten(0, 1)
        new = torch.frombuffer(rows, dtype=getattr(torch, self._features.dtype)).view(-1, states.shape[-1])
        slots = [self.kv.slot(prefix.block_ids, place) for place in range(start, start + len(new))]
        states[torch.tensor(slots, device=states.device)] = new.to(states.device, states.dtype)
