"""TokenDrawer: draws draft tokens from the passes of a model, and how a chain of them is drawn, one pass for each.

What keeps the model's keys and values, and decides which tokens are computed before, is for subclasses to say.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import EngineConfig
from engine.drafting.chain import Chain, Drawn, Ranking, extend
from engine.execution.attention import KVTensors
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch, next_tokens
from engine.protocols import Request
from engine.sampling import noise
from engine.sampling.grammar import Grammars, matcher_of
from engine.sampling.logits import Run, any_needs_shaping, draw, noised, plan_draws, shape
from engine.sampling.noise import Draws
from engine.sampling.params import SamplingParams
from engine.verification.rule import RULES

TOP_M = 32
"""For rules that need draft rows, tokens are sampled from the m likeliest only, so that a sparse row can travel."""


class TokenDrawer:
    """Draws draft tokens from a model in this process."""

    def __init__(
        self,
        backend: Backend,
        kv: KVTensors,
        config: EngineConfig,
        *,
        token_limit: int | None = None,
        ranks: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        """Draw with the noise, and for the rule, that the configuration names.

        Args:
            kv: the cache in which the model's passes read and write.
            token_limit: the target's vocabulary size, if it differs from the draft's: models of one family can pad
                their vocabularies differently. Only ids that both models have are drafted.
            ranks: keep a ranking of the possible tokens with every draw, for running ahead.
            grammars: None if no request may have a grammar.
        """
        self.backend = backend
        self._kv = kv
        self._grammars = grammars
        self._vocab_size = token_limit or backend.info.vocab_size
        self._sends_rows = RULES[config.verification].needs_draft_rows
        self._ranks = ranks

    def _extend(
        self,
        batch: ForwardBatch,
        requests: Sequence[Request],
        tables: Sequence[Sequence[int]],
        chains: Sequence[Chain],
        counts: Sequence[int],
    ) -> None:
        """Append `counts[i]` tokens to chain i.

        Args:
            batch: the pass that computes what is missing up to the end of the chains, with a row of logits for each.
            tables: the requests' block tables, with places for the new tokens.
        """
        heads = [len(chain.token_ids) for chain in chains]
        lengths = [len(request.token_ids) + head for request, head in zip(requests, heads, strict=True)]
        depth = max(counts)
        plan = self._plan([request.params for request in requests], lengths, depth)
        drawn: list[Drawn] = []
        for step in range(depth):
            if step == 1:  # while the first pass computes
                encoder_lengths = [request.encoder_length for request in requests]
                max_length = self.backend.info.max_model_len
                steps = next_tokens(tables, lengths, depth - 1, self._kv, max_length, encoder_lengths)
            if step:
                batch = steps.at(step - 1, drawn[-1].tokens)
            depths = [[head + step] for head in heads]
            runs = functools.partial(self._runs, requests, depths, lambda: self._paths(chains, drawn))
            drawn.append(self._pass(batch, plan[step], runs))
        self.backend.wait()
        extend(chains, drawn, range(len(chains)), counts)

    def _plan(self, params: Sequence[SamplingParams], positions: Sequence[int], steps: int) -> Sequence[Draws | None]:
        """Return what each step's pass needs to draw tokens itself; None if parameters or rule need its logits."""
        if self._sends_rows or self.backend.info.vocab_size > self._vocab_size or any_needs_shaping(params):
            return [None] * steps
        return plan_draws(params, positions, self._kv.input_device, steps)

    def _pass(self, batch: ForwardBatch, draws: Draws | None, runs: Callable[[], list[Run]]) -> Drawn:
        """Compute a batch and draw the next draft token of every row."""
        output = self.backend.run(batch, draws)
        if draws is None:
            return self._draw(output.logits, runs())
        return Drawn(output.tokens, None, self._ranking(output.scores) if self._ranks else None)

    def _ranking(self, scores: Tensor) -> Ranking:
        """Rank possible tokens by scores [n, vocab]; the token that is committed is likely to have the highest."""
        return Ranking(scores)

    def _in_target_ids(self, logits: Tensor) -> Tensor:
        """Cut or pad logits [rows, draft's vocab] to the target's vocabulary."""
        missing = self._vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _runs(
        self,
        requests: Sequence[Request],
        depths: Sequence[list[int]],
        paths: Callable[[], list[list[list[int]]]],
        tips: Sequence[Sequence[int]] = (),
    ) -> list[Run]:
        """Return a run per request.

        Args:
            depths: per request, those of its rows.
            paths: returns, per request and row, the draft tokens before the row; called only if parameters depend on
                them, since it waits for the device.
            tips: per request and row, as in `Run`.
        """
        needs_paths = any(request.params.depends_on_path for request in requests)
        known_paths: Sequence[Sequence[list[int]]] = paths() if needs_paths else [()] * len(requests)
        eos = self.backend.info.eos_token_ids
        return [
            Run(
                request,
                depths=row_depths,
                paths=row_paths,
                end_ids=(*eos, *request.params.stop_token_ids),
                matcher=matcher_of(self._grammars, request),
                tips=row_tips,
            )
            for request, row_depths, row_paths, row_tips in zip(
                requests, depths, known_paths, tips or [[]] * len(requests), strict=True
            )
        ]

    def _paths(self, chains: Sequence[Chain], drawn: Sequence[Drawn]) -> list[list[list[int]]]:
        self.backend.wait()
        new = torch.stack([one.tokens for one in drawn], -1).tolist() if drawn else [[]] * len(chains)
        return [[[*chain.token_ids, *tokens]] for chain, tokens in zip(chains, new, strict=True)]

    def _draw(self, logits: Tensor, runs: Sequence[Run]) -> Drawn:
        """Draw the next draft token of every row of `logits` [n, draft's vocab]."""
        shaped = shape(self._in_target_ids(logits), runs)
        if self._sends_rows:
            tokens, top = self._sample_sparse(shaped, runs)
            if not self._ranks:
                return Drawn(tokens, top)
            # The token after a rejection is what the draft can foresee, and the verifier draws it with this noise.
            return Drawn(tokens, top, self._ranking(noised(shaped, runs, noise.RESIDUAL_STREAM)))
        scores = noised(shaped, runs)
        return Drawn(scores.argmax(-1), None, self._ranking(scores) if self._ranks else None)

    def _sample_sparse(self, shaped: Tensor, runs: Sequence[Run]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Sample from the top m tokens; return the tokens [n], and the ids and probabilities [n, m] they came from."""
        top, ids = shaped.topk(min(TOP_M, shaped.shape[-1]), -1)
        sparse = torch.full_like(shaped, float("-inf")).scatter_(-1, ids, top)
        tokens = draw(sparse, runs, noise.DRAFT_STREAM)
        probs = top.softmax(-1)
        flags = [run.params.temperature == 0 for run in runs for _ in run.depths]
        greedy = torch.tensor(flags, device=shaped.device)
        certain = (ids == tokens.unsqueeze(-1)).to(probs.dtype)
        return tokens, (ids, torch.where(greedy.unsqueeze(-1), certain, probs))
