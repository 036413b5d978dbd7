"""DraftModel: a loaded draft model with everything that its drafter needs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.drafting.model.draft_cache import DraftCache
    from engine.drafting.model.feature_store import FeatureStore
    from engine.execution.backend import Backend
    from engine.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model."""

    backend: "Backend"
    token_limit: int | None = None  # the target's vocabulary size, which models of one family may pad differently
    grammars: "Grammars | None" = None  # None if no request may have a grammar
    run_ahead: bool = False  # the worker launches passes between two proposals
    features: "FeatureStore | None" = None  # the target's, as they arrive
    cache: "DraftCache | None" = None  # shared by all drafters of this model; None if each makes its own

    @property
    def vocab_size(self) -> int:
        """Ids below it may be drafted."""
        return self.token_limit or self.backend.info.vocab_size
