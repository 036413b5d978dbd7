"""ModelDrafter: a small model drafts a chain for every request of a batch, k forward passes for k tokens.

It keeps the keys and values of the prefixes it has seen, as a cache: each proposal brings the committed tokens,
the drafter keeps the longest common prefix of them and what it holds, and computes the rest. A rejected draft
token, a request it never saw and a request it forgot are the same case.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import noise
from engine.batch import ForwardRow, build, next_tokens
from engine.config import EngineConfig
from engine.draft import NO_DRAFT, Draft, ProposeRow, chain
from engine.kv_cache import BlockPool
from engine.logits import Run, draw, shape
from engine.memory import count_blocks
from engine.model import CausalLM

TOP_M = 32
"""Under the rejection rule the drafter samples from its m likeliest tokens only, so that a sparse row can travel."""


@dataclass(slots=True)
class Prefix:
    """The tokens whose keys and values are in the draft's cache, and where."""

    token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts with a model in this process."""

    def __init__(self, model: CausalLM, config: EngineConfig, *, token_limit: int | None = None) -> None:
        """Make the draft's KV cache.

        Args:
            token_limit: the target's vocabulary size, where it differs from the draft's: families pad theirs
                differently. Ids beyond it are never drafted; the target's further ids are never likely.
        """
        self.model = model
        self._vocab_size = token_limit or model.info.vocab_size
        num_blocks = count_blocks(model, config)
        self._pool = BlockPool(num_blocks, config.block_size, share=False)
        self._kv = model.kv_tensors(num_blocks, config.block_size)
        self._sends_rows = config.verification == "rejection"
        self._chunk = config.max_num_batched_tokens
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a chain per row; an empty one where none is wanted, the context is full or the cache has no room."""
        with torch.inference_mode():
            return self._propose(rows)

    def release(self, request_id: str) -> None:
        """Free a request's blocks."""
        if (prefix := self._prefixes.pop(request_id, None)) is not None:
            self._pool.free(prefix.block_ids)

    def _propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        current = {row.request_id for row in rows}
        able = [i for i, row in enumerate(rows) if row.num_draft_tokens and self._make_room(row, current)]
        if able:
            chosen = [rows[i] for i in able]
            for i, draft in zip(able, self._draft(chosen), strict=True):
                drafts[i] = draft
        return drafts

    def _make_room(self, row: ProposeRow, current: set[str]) -> bool:
        """Bring the row's prefix down to what is still committed, and reserve blocks for the draft."""
        length = len(row.token_ids) + row.num_draft_tokens
        if length > self.model.info.max_model_len:
            return False
        prefix = self._prefixes.setdefault(row.request_id, Prefix())
        self._prefixes.move_to_end(row.request_id)
        # The tip's logits are needed again, so its entry never counts as computed.
        del prefix.token_ids[common_length(prefix.token_ids, row.token_ids[:-1]) :]
        if max(row.token_ids[len(prefix.token_ids) :]) >= self.model.info.vocab_size:
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

    def _draft(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        prefixes = [self._prefixes[row.request_id] for row in rows]
        logits = self._catch_up(rows, prefixes)
        depth = max(row.num_draft_tokens for row in rows)
        positions = torch.tensor([len(row.token_ids) for row in rows], device=self.model.device)
        steps = next_tokens([prefix.block_ids for prefix in prefixes], positions, depth - 1, self._kv)
        drawn: list[Tensor] = []
        tops: list[tuple[Tensor, Tensor]] = []
        for step in range(depth):
            runs = self._runs(rows, drawn)
            shaped = shape(self._in_target_ids(logits), runs)
            if self._sends_rows:
                tokens, top = self._sample_sparse(shaped, runs)
                tops.append(top)
            else:
                tokens = draw(shaped, runs)
            drawn.append(tokens)
            if step + 1 < depth:
                logits = self.model.forward(steps.at(step, tokens))
        chains: list[list[int]] = torch.stack(drawn, -1).tolist()
        for row, prefix, tokens_drawn in zip(rows, prefixes, chains, strict=True):
            # The last draft token was not computed, and what a row drew beyond its own draft may have no block.
            prefix.token_ids = [*row.token_ids, *tokens_drawn[: min(row.num_draft_tokens, depth - 1)]]
        return self._assemble(rows, chains, tops)

    def _catch_up(self, rows: Sequence[ProposeRow], prefixes: Sequence[Prefix]) -> Tensor:
        """Compute every row up to its tip. Returns the logits at the tips, [rows, vocab]."""
        done = [len(prefix.token_ids) for prefix in prefixes]
        while True:
            room = self._chunk
            parts = []
            for i, row in enumerate(rows):
                # Each row keeps a token for the last pass, so that all tips are computed in one.
                count = min(len(row.token_ids) - done[i] - 1, room)
                if count > MAX_TAIL and room:
                    parts.append((i, count))
                    room -= count
            if not parts:
                break
            chunk = [
                ForwardRow(rows[i].token_ids[done[i] : done[i] + count], done[i], prefixes[i].block_ids, 0)
                for i, count in parts
            ]
            self.model.forward(build(chunk, self._kv))
            for i, count in parts:
                done[i] += count
        tips = [
            ForwardRow(row.token_ids[start:], start, prefix.block_ids, 1)
            for row, start, prefix in zip(rows, done, prefixes, strict=True)
        ]
        return self.model.forward(build(tips, self._kv))

    def _in_target_ids(self, logits: Tensor) -> Tensor:
        """Cut or widen logits [rows, own vocab] to the target's vocabulary."""
        missing = self._vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _runs(self, rows: Sequence[ProposeRow], drawn: Sequence[Tensor]) -> list[Run]:
        """Return one logit row per request, after the tokens drawn so far."""
        paths: list[list[int]] = [[] for _ in rows]
        if drawn and any(row.params.has_penalties for row in rows):
            paths = torch.stack(list(drawn), -1).tolist()
        return [
            Run(
                row.params,
                row.token_ids,
                row.prompt_length,
                [len(drawn)],
                [path],
                (*self.model.info.eos_token_ids, *row.params.stop_token_ids),
            )
            for row, path in zip(rows, paths, strict=True)
        ]

    def _sample_sparse(self, shaped: Tensor, runs: Sequence[Run]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Sample from the top m tokens; returns the tokens [rows] and the rows they came from, [rows, m] each."""
        top, ids = shaped.topk(min(TOP_M, shaped.shape[-1]), -1)
        sparse = torch.full_like(shaped, float("-inf")).scatter_(-1, ids, top)
        tokens = draw(sparse, runs, noise.DRAFT_STREAM)
        probs = top.softmax(-1)
        greedy = torch.tensor([run.params.temperature == 0 for run in runs], device=shaped.device)
        certain = (ids == tokens.unsqueeze(-1)).to(probs.dtype)
        return tokens, (ids, torch.where(greedy.unsqueeze(-1), certain, probs))

    def _assemble(
        self, rows: Sequence[ProposeRow], chains: list[list[int]], tops: list[tuple[Tensor, Tensor]]
    ) -> list[Draft]:
        drafts = [chain(tokens[: row.num_draft_tokens]) for row, tokens in zip(rows, chains, strict=True)]
        if not tops:
            return drafts
        ids = torch.stack([top[0] for top in tops], 1).tolist()
        probs = torch.stack([top[1] for top in tops], 1).tolist()
        return [
            Draft(draft.token_ids, draft.parents, row_ids[: len(draft.token_ids)], row_probs[: len(draft.token_ids)])
            for draft, row_ids, row_probs in zip(drafts, ids, probs, strict=True)
        ]


MAX_TAIL = 8
"""Rows with at most this many tokens to catch up do it in the pass that computes the tips."""


def common_length(known: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the length of the longest common prefix; the usual case, few tokens apart, is one comparison."""
    length = min(len(known), len(wanted))
    while length and known[:length] != wanted[:length]:
        low = max(length - 16, 0)
        if known[:low] == wanted[:low]:
            return next(i for i in range(low, length) if known[i] != wanted[i])
        length = low
    return length
