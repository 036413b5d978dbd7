"""Speculative decoding as a library: tensors and tokens; no Ray, no HTTP.

Reading order: draft.py (the roles and the words of a round), engine.py (a step), scheduler.py and sequence.py
(who takes part, what is committed), verifier.py and verification/ (the decision), drafters/ (the proposals),
logits.py and noise.py (how a token is drawn), batch.py, attention.py, model.py (the forward pass), kv_cache.py
(blocks), llm.py (all of it in one process).
"""

from typing import TYPE_CHECKING, Any

from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import `LLM` when it is asked for: most processes of the service need parts of this package, and no torch."""
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
