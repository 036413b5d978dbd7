"""TokenDrawer: runs the passes of a draft model and draws tokens from them, for a chain one pass per token."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.next_tokens import RankedRow, Ranking
from engine.execution.backend import ChainBatch
from engine.execution.batch import ForwardBatch, block_tensor, next_tokens
from engine.execution.kv_tensors import KVTensors
from engine.params import SamplingParams
from engine.protocols import Draft, Request, chain
from engine.sampling import noise
from engine.sampling.grammar import matcher_of
from engine.sampling.logits import Run, draw, needs_shaping, noised, plan_draws, shape
from engine.sampling.noise import Draws
from engine.sampling.row_shaping import row_shaping
from engine.verification.rule import rule_of

TOP_M = 32
"""Rules with draft rows sample from the m likeliest tokens only, so that a sparse row can travel."""
Paths = Callable[[], list[list[list[int]]]]
"""Returns, per request and row, the draft tokens before the row."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens that one forward pass drew, still on the device."""

    tokens: Tensor  # [n]
    top: tuple[Tensor, Tensor] | None = None  # [n, m] ids and probabilities of the draw, for rules with draft rows
    ranking: Ranking | None = None  # tokens that may be committed instead, for run-ahead


@dataclass(slots=True)
class Chain:
    """One request's draft tokens as they are drawn; `top_ids`, `top_probs` and `rankings` are per token, or empty."""

    token_ids: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_probs: list[list[float]] = field(default_factory=list)
    rankings: list[RankedRow] = field(default_factory=list)

    def cut(self, length: int) -> None:
        del self.token_ids[length:], self.top_ids[length:], self.top_probs[length:], self.rankings[length:]

    def draft(self) -> Draft:
        draft = chain(list(self.token_ids))
        return replace(draft, top_ids=list(self.top_ids), top_probs=list(self.top_probs)) if self.top_ids else draft


def extend(chains: Sequence[Chain], drawn: Sequence[Drawn], rows: Sequence[int], counts: Sequence[int]) -> None:
    """Append the first `counts[i]` tokens drawn for row `rows[i]` to chain i; rankings stay on the device."""
    tokens = torch.stack([step.tokens for step in drawn], 1).tolist()
    tops = [step.top for step in drawn if step.top is not None]
    ids, probs = (torch.stack(steps, 1).tolist() for steps in zip(*tops, strict=True)) if tops else ([], [])
    rankings = [step.ranking for step in drawn if step.ranking is not None]
    for extended, row, count in zip(chains, rows, counts, strict=True):
        extended.token_ids += tokens[row][:count]
        if tops:
            extended.top_ids += ids[row][:count]
            extended.top_probs += probs[row][:count]
        extended.rankings += [(ranking, row) for ranking in rankings[:count]]


def likeliest(shaped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the top m ids and logits of each row [n, m], and all logits with -inf elsewhere [n, vocab]."""
    top, ids = shaped.topk(min(TOP_M, shaped.shape[-1]), -1)
    return ids, top, torch.full_like(shaped, float("-inf")).scatter_(-1, ids, top)


class TokenDrawer:
    """Draws draft tokens; `draws_chains` says that all passes of a chain may be launched at once."""

    draws_chains = True

    def __init__(
        self,
        draft: DraftModel,
        kv: KVTensors,
        config: EngineConfig,
        *,
        ranks: bool = False,
        num_ranked: int | None = None,
    ) -> None:
        """Draw for the configuration's rule; `ranks` keeps the `num_ranked` best tokens (None: all) of each draw."""
        self._backend = draft.backend
        self._kv = kv
        self._grammars = draft.grammars
        self.vocab_size = draft.vocab_size
        self._sends_rows = rule_of(config.verification).needs_draft_rows
        self._needs_logits = self._sends_rows or draft.backend.info.vocab_size > draft.vocab_size
        self._ranks = ranks
        self._num_ranked = num_ranked
        can_rank = not ranks or num_ranked is not None
        self._draws_chains = bool(
            self.draws_chains
            and not self._needs_logits
            and can_rank
            and draft.backend.plan_chains(config.num_speculative_tokens, self._num_kept)
        )

    @property
    def _num_kept(self) -> int:
        return min(self._num_ranked or 0, self._backend.info.vocab_size)

    def release(self, request_id: str) -> None:
        if self._grammars is not None:
            self._grammars.release(request_id)

    def end_ids(self, request: Request) -> set[int]:
        eos = () if request.params.ignore_eos else self._backend.info.eos_token_ids
        return {*eos, *request.params.stop_token_ids}

    def extend(
        self,
        batch: ForwardBatch,
        requests: Sequence[Request],
        tables: Sequence[Sequence[int]],
        chains: Sequence[Chain],
        counts: Sequence[int],
    ) -> None:
        """Append `counts[i]` tokens to chain i.

        `batch` computes the tokens up to the ends of the chains that are not cached, with a row of logits per chain.
        `tables` are the requests' block tables, with room for the new tokens.
        """
        depths = [len(chain.token_ids) for chain in chains]
        lengths = [len(request.token_ids) + depth for request, depth in zip(requests, depths, strict=True)]
        num_passes = max(counts)
        drawn: list[Drawn] = []
        if num_passes > 1 and self._draws_chains:
            drawn = self._draw_at_once(batch, requests, tables, chains, num_passes)
        plan = [] if drawn else self.plan(requests, [[depth] for depth in depths], num_passes)

        def paths() -> list[list[list[int]]]:
            new = torch.stack([step.tokens for step in drawn], -1).tolist() if drawn else [[]] * len(chains)
            return [[[*chain.token_ids, *tokens]] for chain, tokens in zip(chains, new, strict=True)]

        for step in range(len(plan)):
            if step == 1:  # while the first pass computes
                max_length = self._backend.info.max_model_len
                next_batch = next_tokens(tables, lengths, num_passes - 1, self._kv, max_length, batch.added)
            if step:
                batch = next_batch(step - 1, drawn[-1].tokens)
            runs = functools.partial(self.runs, requests, [[depth + step] for depth in depths], paths)
            drawn.append(self.run(batch, plan[step], runs))
        self._backend.wait()
        extend(chains, drawn, range(len(chains)), counts)

    def _draw_at_once(
        self,
        first: ForwardBatch,
        requests: Sequence[Request],
        tables: Sequence[Sequence[int]],
        chains: Sequence[Chain],
        depth: int,
    ) -> list[Drawn]:
        """Launch all passes at once; return an empty list if rule, parameters or backend do not allow it."""
        if len(first.paged.groups) > 1:
            return []
        drafted, info, shaping = [chain.token_ids for chain in chains], self._backend.info, None
        params = [request.params for request in requests]
        if any(needs_shaping(sampling) for sampling in params):
            shaping = row_shaping(requests, drafted, info.eos_token_ids, info.vocab_size)
            if shaping is None:
                return []
            params = [SamplingParams(temperature=raw.temperature, seed=raw.seed) for raw in params]
        lengths = [len(request.token_ids) + len(tokens) for request, tokens in zip(requests, drafted, strict=True)]
        draws = plan_draws(params, lengths, self._kv.input_device, depth)
        first.paged.groups[0].blocks = block_tensor(tables, self._kv.input_device)
        output = self._backend.draw_chain(ChainBatch(first, draws, lengths, self._num_kept, shaping))
        if output is None:
            return []
        rankings = [Ranking(*ranked) for ranked in output[1]]
        return [Drawn(*step) for step in itertools.zip_longest(output[0].unbind(1), [None] * depth, rankings)]

    def plan(
        self, requests: Sequence[Request], depths: Sequence[Sequence[int]], steps: int = 1
    ) -> Sequence[Draws | None]:
        """Return each step's draws, or None if they need logits; depths: per request, of its rows in the first step."""
        if self._needs_logits or any(needs_shaping(request.params) for request in requests):
            return [None] * steps
        rows = [(request, depth) for request, row in zip(requests, depths, strict=True) for depth in row]
        positions = [len(request.token_ids) + depth for request, depth in rows]
        return plan_draws([request.params for request, _ in rows], positions, self._kv.input_device, steps)

    def step(
        self, batch: ForwardBatch, requests: Sequence[Request], depths: Sequence[list[int]], paths: Paths
    ) -> Drawn:
        (draws,) = self.plan(requests, depths)
        return self.run(batch, draws, lambda: self.runs(requests, depths, paths))

    def run(self, batch: ForwardBatch, draws: Draws | None, runs: Callable[[], list[Run]]) -> Drawn:
        batch.needs_logits = draws is None or self._ranks
        output = self._backend.run(batch, draws)
        if draws is None:
            return self._draw(output.logits, runs())
        return Drawn(output.tokens, None, self._ranking(output.scores))

    def _ranking(self, scores: Tensor) -> Ranking | None:
        """Rank possible tokens by scores [n, vocab]; the token that will be committed is likely to have the highest."""
        if not self._ranks:
            return None
        ranking = Ranking(self.in_target_ids(scores))
        return ranking if self._num_ranked is None else Ranking(*ranking.top(self._num_ranked))

    def in_target_ids(self, logits: Tensor) -> Tensor:
        """Cut or pad logits [rows, draft's vocab] to the target's vocabulary."""
        missing = self.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def runs(
        self, requests: Sequence[Request], depths: Sequence[list[int]], paths: Paths, tips: Sequence[Sequence[int]] = ()
    ) -> list[Run]:
        """Return a run per request, with rows of these depths.

        `paths` is called only if parameters depend on paths, after waiting for the device. `tips`: per request and row,
        the committed length when the row is drawn; empty if that is the next round.
        """
        known_paths: Sequence[Sequence[list[int]]] = [()] * len(requests)
        if any(request.params.depends_on_path for request in requests):
            self._backend.wait()
            known_paths = paths()
        eos = self._backend.info.eos_token_ids
        return [
            Run(
                request,
                depths=row_depths,
                paths=row_paths,
                end_ids=(*eos, *request.params.stop_token_ids),
                matcher=matcher_of(self._grammars, request),
                seeds=[noise.round_seed(request.params.seed or 0, tip) for tip in row_tips] if self._sends_rows else (),
            )
            for request, row_depths, row_paths, row_tips in zip(
                requests, depths, known_paths, tips or [[]] * len(requests), strict=True
            )
        ]

    def _draw(self, logits: Tensor, runs: Sequence[Run]) -> Drawn:
        shaped = shape(self.in_target_ids(logits), runs)
        if not self._sends_rows:
            scores = noised(shaped, runs)
            return Drawn(scores.argmax(-1), None, self._ranking(scores))
        ids, top, sparse = likeliest(shaped)
        tokens = draw(sparse, runs, noise.DRAFT_STREAM)
        flags = [run.params.temperature == 0 for run in runs for _ in run.depths]
        greedy = torch.tensor(flags, device=shaped.device).unsqueeze(-1)
        probs = torch.where(greedy, (ids == tokens.unsqueeze(-1)).to(top.dtype), top.softmax(-1))
        if not self._ranks:
            return Drawn(tokens, (ids, probs))
        # The draft can predict the token after a rejection, which the verifier draws with this noise.
        return Drawn(tokens, (ids, probs), self._ranking(noised(shaped, runs, noise.RESIDUAL_STREAM)))
