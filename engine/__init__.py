"""Speculative decoding as a library: tensors and tokens; no Ray, no HTTP.

Reading order: draft.py (the roles and the words of a round), engine.py (a step), scheduler.py and sequence.py
(who takes part, what is committed), verifier.py and verification/ (the decision), drafters/ (the proposals),
logits.py and noise.py (how a token is drawn), batch.py, attention.py, model.py (the forward pass), kv_cache.py
(blocks), llm.py (all of it in one process).
"""

from engine.llm import LLM
from engine.sampling import SamplingParams

__all__ = ["LLM", "SamplingParams"]
