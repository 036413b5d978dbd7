"""SelfDrafter: the target drafts for itself, with its first layers, final norm and head.

It has no cache. Its passes read the target's keys and values of the committed tokens, and write the tip's and the draft
tokens' into the slots that the verification pass then overwrites. So nothing is kept, committed or rolled back between
rounds.

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
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.protocols import VerifyRow
from engine.sampling.grammar import Grammars
from engine.sampling.logits import Run
from engine.sampling.noise import Draws


class SelfDrafter(TokenDrawer):
    """Drafts with the target; see `TargetDrafter`. All ranks need each token before the next pass."""

    draws_chains = False

    def __init__(self, config: EngineConfig, backend: Backend, kv: KVTensors, grammars: Grammars | None = None) -> None:
        assert config.self_draft_layers is not None
        thinned, seen_kv = backend.thin(config.self_draft_layers, kv)
        super().__init__(DraftModel(thinned, grammars=grammars), seen_kv, config)
        self._decides = True

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        """Draw chains for the rows whose drafts were left to the target; see `TargetDrafter.draft`."""
        self._decides = decides
        drafted = [row for row in rows if row.draft.num_deferred]
        tips = [ForwardRow(row.request.token_ids[row.start :], row.start, row.block_ids, 1) for row in drafted]
        chains = [Chain() for _ in drafted]
        self.extend(
            build(tips, self._kv),
            [row.request for row in drafted],
            [row.block_ids for row in drafted],
            chains,
            [row.draft.num_deferred for row in drafted],
        )
        drafts = (chain.draft() for chain in chains)
        return [replace(row, draft=next(drafts)) if row.draft.num_deferred else row for row in rows]

    def run(self, batch: ForwardBatch, draws: Draws | None, runs: Callable[[], list[Run]]) -> Drawn:
        """Compute a batch; the next draft token of every row is the one that the deciding rank draws."""
        batch.needs_logits = draws is None
        if self._decides:
            drawn = super().run(batch, draws, runs)
        else:
            drawn = Drawn(torch.zeros_like(self._backend.run(batch, draws).tokens))
        reducer = self._backend.reducer
        return drawn if reducer is None else replace(drawn, tokens=reducer.sum(drawn.tokens))
