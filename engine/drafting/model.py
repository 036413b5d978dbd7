"""ModelDrafter: a small model drafts a chain for every request of a batch, k forward passes for k tokens.

It keeps the keys and values of the prefixes it has seen, as a cache: each proposal brings the committed tokens,
the drafter keeps the longest common prefix of them and what it holds, and computes the rest. A rejected draft
token, a request it never saw and a request it forgot are the same case.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Container, Generator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.drafting.cached_prefix import CachedPrefix, Text, common_length
from engine.drafting.chain import Chain, Drawn, Ranking, extend
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch, ForwardRow, build, next_tokens
from engine.protocols import NO_DRAFT, Draft, ProposeRow, Request
from engine.sampling import noise
from engine.sampling.grammar import Grammars, matcher_of
from engine.sampling.logits import Run, any_needs_shaping, draw, noised, plan_draws, shape
from engine.sampling.noise import Draws
from engine.sampling.params import SamplingParams
from engine.verification.rule import RULES

TOP_M = 32
"""Under the rejection rule the drafter samples from its m likeliest tokens only, so that a sparse row can travel."""


class ModelDrafter:
    """Drafts with a model in this process."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        token_limit: int | None = None,
        ranks: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        """Make the draft's KV cache.

        Args:
            config: with its `num_blocks` planned.
            token_limit: the target's vocabulary size, if it differs from the draft's: models of one family can pad
                their vocabularies differently. Only ids that both models have are drafted.
            ranks: keep a ranking of the possible tokens with every draw, for running ahead.
            grammars: None if no request may have a grammar.
        """
        assert config.num_blocks is not None
        self.backend = backend
        self._grammars = grammars
        self._vocab_size = token_limit or backend.info.vocab_size
        num_blocks = config.num_blocks + 1
        self._pool = BlockPool(num_blocks, config.block_size, share=False)
        self._kv = backend.allocate_kv(num_blocks, config.block_size)
        self._sends_rows = RULES[config.verification].needs_draft_rows
        self._ranks = ranks
        self._chunk = config.max_num_batched_tokens
        self._prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a chain per row; it is empty if none is requested, the context is full or the cache has no room."""
        with torch.inference_mode():
            return self._propose(rows)

    def release(self, request_id: str) -> None:
        """Free a request's blocks."""
        if (prefix := self._prefixes.pop(request_id, None)) is not None:
            self._pool.free(prefix.block_ids)
        if self._grammars is not None:
            self._grammars.release(request_id)

    def _propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        current = {row.request.request_id for row in rows}
        able = [i for i, row in enumerate(rows) if row.num_draft_tokens and self._make_room(row, [], current)]
        if able:
            chains = [Chain() for _ in able]
            self._draft([rows[i] for i in able], chains)
            for i, drawn in zip(able, chains, strict=True):
                drafts[i] = drawn.draft()
        return drafts

    def _make_room(self, row: ProposeRow, drafted: Sequence[int], current: Container[str]) -> bool:
        """Cut a row's cached prefix to what its text still begins with, and reserve blocks for its draft.

        Args:
            drafted: the draft tokens already drawn after the committed ones.
            current: requests whose prefixes may not be evicted for this one.

        Returns:
            Whether the row can get a draft: it fits the context and the cache, and the draft knows all of its tokens.
        """
        request = row.request
        length = len(request.token_ids) + row.num_draft_tokens
        if length > self.backend.info.max_model_len:
            return False
        prefix = self._prefixes.setdefault(request.request_id, CachedPrefix())
        self._prefixes.move_to_end(request.request_id)
        text = Text(request.token_ids, drafted)
        del prefix.token_ids[common_length(prefix, text) :]
        if max(text.part(len(prefix.token_ids), text.length)) >= self.backend.info.vocab_size:
            return False
        missing = self._pool.blocks_for(length) - len(prefix.block_ids)
        blocks = self._pool.allocate(max(missing, 0))
        while blocks is None:
            victim = next((name for name in self._prefixes if name not in current), None)
            if victim is None:
                return False
            self.release(victim)
            blocks = self._pool.allocate(missing)
        prefix.block_ids += blocks
        return True

    def _draft(self, rows: Sequence[ProposeRow], chains: Sequence[Chain]) -> None:
        """Draw until every row's chain has `num_draft_tokens` tokens; at least one is missing in each."""
        requests = [row.request for row in rows]
        prefixes = [self._prefixes[request.request_id] for request in requests]
        heads = [len(chain.token_ids) for chain in chains]
        texts = [
            Text(request.token_ids, list(chain.token_ids)) for request, chain in zip(requests, chains, strict=True)
        ]
        counts = [row.num_draft_tokens - head for row, head in zip(rows, heads, strict=True)]
        depth = max(counts)
        batch = finish(self._catch_up(texts, prefixes))
        lengths = [text.length for text in texts]
        plan = self._plan([request.params for request in requests], lengths, depth)
        drawn: list[Drawn] = []
        for step in range(depth):
            if step == 1:  # while the first pass computes
                tables = [prefix.block_ids for prefix in prefixes]
                steps = next_tokens(tables, lengths, depth - 1, self._kv, self.backend.info.max_model_len)
            if step:
                batch = steps.at(step - 1, drawn[-1].tokens)
            depths = [[head + step] for head in heads]
            runs = functools.partial(self._runs, requests, depths, lambda: self._paths(chains, drawn))
            drawn.append(self._pass(batch, plan[step], runs))
        self.backend.wait()
        extend(chains, drawn, range(len(chains)), counts)
        for text, prefix, chain, head, count in zip(texts, prefixes, chains, heads, counts, strict=True):
            # The last draft token is not computed yet, and tokens drawn beyond a row's own draft may have no block.
            prefix.token_ids += text.part(len(prefix.token_ids), text.length)
            prefix.token_ids += chain.token_ids[head : head + count - 1]

    def _catch_up(self, texts: Sequence[Text], prefixes: Sequence[CachedPrefix]) -> Generator[None, None, ForwardBatch]:
        """Compute all but the last tokens of every row, yielding after every pass.

        Returns:
            The pass that remains: the last tokens of all rows, with a row of logits for each.
        """
        while True:
            room = self._chunk
            chunks = []
            for text, prefix in zip(texts, prefixes, strict=True):
                start = len(prefix.token_ids)
                count = min(text.length - start - 1, room)
                if count > MAX_TAIL and room:
                    chunks.append((prefix, ForwardRow(text.part(start, start + count), start, prefix.block_ids, 0)))
                    room -= count
            if not chunks:
                break
            self.backend.run(build([row for _, row in chunks], self._kv))
            for prefix, row in chunks:
                prefix.token_ids += row.token_ids
            yield
        tips = [
            ForwardRow(text.part(start := len(prefix.token_ids), text.length), start, prefix.block_ids, 1)
            for text, prefix in zip(texts, prefixes, strict=True)
        ]
        return build(tips, self._kv)

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


MAX_TAIL = 8
"""Rows that lag by at most this many tokens compute them in the pass of their last token."""


def finish(work: Generator[None, None, ForwardBatch]) -> ForwardBatch:
    """Run work that yields between passes to its end, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ForwardBatch = end.value
            return result
