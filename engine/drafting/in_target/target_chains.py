"""TargetChainDrafter: chains of a model in the target's process, over the target's cache.

It has no cache. Its passes read the committed tokens' entries in the target's cache. They write entries of the tip and
of draft tokens into slots that the verification pass then overwrites. So nothing is rolled back.

Each rank of the target drafts when a verification asks for it, so a round takes one message to the target.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.next_tokens import Ranking
from engine.drafting.model.token_drawer import Chain, Drawn, TokenDrawer
from engine.execution.backend import Backend, Part
from engine.execution.batch import ForwardBatch, build
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors
from engine.protocols import NO_DRAFT, Draft, VerifyRow
from engine.sampling.grammar import Grammars
from engine.sampling.logits import Run
from engine.sampling.noise import Draws


class TargetChainDrafter(TokenDrawer):
    """Drafts chains in the target's process; see `TargetDrafter`."""

    def __init__(
        self,
        part: Part,
        config: EngineConfig,
        backend: Backend,
        kv: KVTensors,
        grammars: Grammars | None = None,
        *,
        num_ranked: int | None = None,
    ) -> None:
        """Keep `num_ranked` tokens of each draw; `part` is passed to `Backend.beside`."""
        part_backend, self.kv = backend.beside(part, kv)
        # All ranks need each token before the next pass, and drafts that branch are not drawn as chains.
        self.draws_chains = backend.reducer is None and num_ranked is None
        self.draft_model = DraftModel(part_backend, grammars=grammars)
        super().__init__(self.draft_model, self.kv, config, ranks=num_ranked is not None, num_ranked=num_ranked)
        self._least_tokens = 1 + part_backend.model.attends_from
        self._reducer = backend.reducer
        self.decides = True
        """Whether this rank draws the tokens."""

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        self.decides = decides
        able = self.able(rows)
        chains = [Chain() for _ in able]
        if able:
            requests, tables = [row.request for row in able], [row.block_ids for row in able]
            self.extend(self.tips(able), requests, tables, chains, [row.draft.num_deferred for row in able])
        return with_drafts(rows, able, [chain.draft() for chain in chains])

    def able(self, rows: Sequence[VerifyRow]) -> list[VerifyRow]:
        """Return the rows whose drafts are left to the target and that have enough tokens."""
        return [row for row in rows if row.draft.num_deferred and len(row.request.token_ids) >= self._least_tokens]

    def tips(self, rows: Sequence[VerifyRow]) -> ForwardBatch:
        """Return the pass that computes the rows' committed tokens, with logits of each row's last token."""
        tips = [
            ForwardRow(
                row.request.token_ids[row.start :],
                row.start,
                row.block_ids,
                1,
                prompt_length=row.request.prompt_length,
                slot=row.slot and row.slot._replace(saves=()),
            )
            for row in rows
        ]
        return build(tips, self.kv, carries=True)

    def run(self, batch: ForwardBatch, draws: Draws | None, runs: Callable[[], list[Run]]) -> Drawn:
        """Compute a batch; every rank gets the deciding rank's draws."""
        batch.needs_logits = draws is None or self._ranks
        if self.decides:
            drawn = super().run(batch, draws, runs)
        else:
            tokens = torch.zeros_like(self._backend.run(batch, draws).tokens)
            ids = tokens.new_zeros(len(tokens), self._num_kept)
            drawn = Drawn(tokens, ranking=Ranking(ids.float(), ids) if self._ranks else None)
        if self._reducer is None:
            return drawn
        ranking = drawn.ranking
        if ranking is not None and ranking.token_ids is not None:
            ranking = Ranking(self._reducer.sum(ranking.scores), self._reducer.sum(ranking.token_ids))
        return replace(drawn, tokens=self._reducer.sum(drawn.tokens), ranking=ranking)


def with_drafts(rows: Sequence[VerifyRow], drafted: Sequence[VerifyRow], drafts: Sequence[Draft]) -> list[VerifyRow]:
    """Replace deferred drafts: rows in `drafted` get their `drafts`, other rows an empty draft."""
    made = {id(row): draft for row, draft in zip(drafted, drafts, strict=True)}
    return [replace(row, draft=made.get(id(row), NO_DRAFT)) if row.draft.num_deferred else row for row in rows]
