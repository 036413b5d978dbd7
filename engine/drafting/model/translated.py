"""TranslatedBackend: a draft model with another tokenizer, as if it had the target's tokens.

Token-level intersection (TLI) of Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies" (2502.05202), Algorithm 4: only shared tokens are drafted. Logits get the
target's order before a draw: drafts share the target's noise, and draft rows are over its ids, so every rule applies. A
target token that the draft lacks is read as its text's last piece, one token for one.
"""

import logging
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from engine.execution.backend import Backend, PassOutput
from engine.execution.batch import ForwardBatch
from engine.models.source import ModelSource
from engine.sampling import noise

logger = logging.getLogger(__name__)

_NEVER = -1e30
"""Logit of tokens that the draft lacks: probability 0, but finite, because a grammar may allow no other tokens."""


def translated(backend: Backend, target: ModelSource, draft: ModelSource, shared: dict[int, int] | None) -> Backend:
    """Return a draft's backend in the target's token ids, given `shared_tokens`; unchanged if the ids are the same."""
    if shared is None:
        return backend
    logger.info("the draft's tokenizer is another one: it can draft %d of the target's tokens", len(shared))
    reads = torch.zeros(target.vocab_size, dtype=torch.int64)
    lacking = [token for token in range(target.vocab_size) if token not in shared]
    texts = target.tokenizer.backend_tokenizer.decode_batch([[token] for token in lacking])
    encoded = draft.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    for token, pieces in zip(lacking, encoded, strict=True):
        reads[token] = next((piece for piece in reversed(pieces.ids) if piece < draft.vocab_size), 0)
    reads[list(shared)] = torch.tensor(list(shared.values()))
    info = replace(backend.info, vocab_size=target.vocab_size, eos_token_ids=target.eos_token_ids)
    return cast("Backend", TranslatedBackend(backend, info, reads, torch.tensor(list(shared))))


class TranslatedBackend:
    """Runs a draft's passes with the target's token ids, pass by pass, because tokens are translated in between.

    reads: [target's vocab] the draft's token for each target token; shared: [n] target tokens that may be drafted.
    """

    def __init__(self, backend: Backend, info: Any, reads: Tensor, shared: Tensor) -> None:
        self.info = info
        self._backend = backend
        self._reads, self._shared, self._sources = (ids.to(backend.device) for ids in (reads, shared, reads[shared]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def plan_chains(self, num_steps: int, num_ranked: int) -> bool:
        return False

    def run(self, batch: ForwardBatch, draws: noise.Draws | None = None) -> PassOutput:
        token_ids = self._reads[batch.token_ids.to(self.device, non_blocking=True)]
        output = self._backend.run(replace(batch, token_ids=token_ids, needs_logits=True))
        logits = output.logits.new_full((len(output.logits), self.info.vocab_size), _NEVER)
        logits[:, self._shared] = output.logits[:, self._sources]
        scores = logits if draws is None else noise.noised_logits(logits, draws.to(self.device))
        return PassOutput(logits, scores, scores.argmax(-1))
