"""TargetChainDrafter: chains of a model in the target's process: the target's first layers, or a trained head.

It has no cache. Its passes read what the target's cache holds about the committed tokens, and write about the tip and
the draft tokens into the slots that the verification pass then overwrites. So nothing is kept, committed or rolled back
between rounds.

Drafts are made in the process of the target, on each of its ranks, when a verification asks for them: so a round takes
one message to the target, and its drafts come back with the verdicts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.token_drawer import Chain, Drawn, TokenDrawer
from engine.execution.attention import KVTensors
from engine.execution.backend import Backend, Part
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.protocols import NO_DRAFT, VerifyRow
from engine.sampling.grammar import Grammars
from engine.sampling.logits import Run
from engine.sampling.noise import Draws


class TargetChainDrafter(TokenDrawer):
    """Drafts chains in the target's process; see `TargetDrafter`."""

    def __init__(
        self, part: Part, config: EngineConfig, backend: Backend, kv: KVTensors, grammars: Grammars | None = None
    ) -> None:
        """Draft with a part of the target's model; see `Backend.beside`."""
        other, seen_kv = backend.beside(part, kv)
        self.draws_chains = backend.reducer is None  # all ranks need each token before the next pass
        super().__init__(DraftModel(other, grammars=grammars), seen_kv, config)
        head = other.model.head
        self._least_tokens = 1 + (head.attends_from if head is not None else 0)
        self._reducer = backend.reducer
        self._decides = True

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        """Draw chains for the rows whose drafts were left to the target; see `TargetDrafter.draft`."""
        self._decides = decides
        able = [row for row in rows if row.draft.num_deferred and len(row.request.token_ids) >= self._least_tokens]
        chains = [Chain() for _ in able]
        if able:
            tips = [ForwardRow(row.request.token_ids[row.start :], row.start, row.block_ids, 1) for row in able]
            self.extend(
                build(tips, self._kv),
                [row.request for row in able],
                [row.block_ids for row in able],
                chains,
                [row.draft.num_deferred for row in able],
            )
        drafts = {id(row): chain.draft() for row, chain in zip(able, chains, strict=True)}
        return [replace(row, draft=drafts.get(id(row), NO_DRAFT)) if row.draft.num_deferred else row for row in rows]

    def run(self, batch: ForwardBatch, draws: Draws | None, runs: Callable[[], list[Run]]) -> Drawn:
        """Compute a batch; the next draft token of every row is the one that the deciding rank draws."""
        batch.needs_logits = draws is None
        if self._decides:
            drawn = super().run(batch, draws, runs)
        else:
            drawn = Drawn(torch.zeros_like(self._backend.run(batch, draws).tokens))
        return drawn if self._reducer is None else replace(drawn, tokens=self._reducer.sum(drawn.tokens))
