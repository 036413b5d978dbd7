"""DraftModel: a loaded draft model with everything that its drafter needs; the one argument of drafters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.drafting.model.draft_cache import DraftCache
    from engine.drafting.model.feature_store import FeatureStore
    from engine.execution.backend import Backend
    from engine.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model.

    Attributes:
        token_limit: the target's vocabulary size, if it differs from the draft's: models of one family can pad their
            vocabularies differently. Only ids that both models have are drafted.
        grammars: None if no request may have a grammar.
        run_ahead: the worker calls `advance` between two proposals, so that drafting continues meanwhile.
        features: the target's features as they arrive, for a head; None for a model of its own.
        cache: of all drafters of this model; None if each makes its own.
    """

    backend: "Backend"
    token_limit: int | None = None
    grammars: "Grammars | None" = None
    run_ahead: bool = False
    features: "FeatureStore | None" = None
    cache: "DraftCache | None" = None

    @property
    def vocab_size(self) -> int:
        """Ids below it may be drafted."""
        return self.token_limit or self.backend.info.vocab_size
