"""SelfDrafter: the target drafts for itself, with its first layers or without some of its sub-layers.

It has no cache. Its passes read the target's own keys and values of the committed tokens, and write those of the
committed tip and of draft tokens into the target's blocks, at the places that the verification pass is about to compute
and write anew with all layers. What that pass reads, and with it the text, therefore does not depend on the draft; nor
does anything have to be kept, committed or rolled back between rounds.

Drafts are made in the process of the target, on each of its ranks, when a verification asks for them: so a round takes
one message to the target, and its drafts come back with the verdicts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.drafting.chain import Chain, Drawn
from engine.drafting.token_drawer import TokenDrawer
from engine.execution.attention import KVTensors
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.models.sub_layers import skipped_sub_layers
from engine.protocols import VerifyRow
from engine.sampling.grammar import Grammars
from engine.sampling.logits import Run
from engine.sampling.noise import Draws


class SelfDrafter(TokenDrawer):
    """Drafts with the target; see `TargetDrafter`."""

    def __init__(self, config: EngineConfig, backend: Backend, kv: KVTensors, grammars: Grammars | None = None) -> None:
        """Thin the target.

        Args:
            backend: the target's.
            kv: the target's cache.
            grammars: None if no request may have a grammar.

        Raises:
            ModelError: the target does not have these layers, or they cannot be skipped.
        """
        skipped = skipped_sub_layers(config, backend.info.name, len(kv.keys))
        thinned, seen_kv = backend.thin(skipped, kv)
        super().__init__(thinned, seen_kv, config, grammars=grammars)
        self._decides = True

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        """Draw chains for the rows whose drafts were left to the target; see `TargetDrafter.draft`."""
        self._decides = decides
        drafted = [row for row in rows if row.draft.num_deferred]
        tips = [ForwardRow(row.request.token_ids[row.start :], row.start, row.block_ids, 1) for row in drafted]
        chains = [Chain() for _ in drafted]
        self._extend(
            build(tips, self._kv),
            [row.request for row in drafted],
            [row.block_ids for row in drafted],
            chains,
            [row.draft.num_deferred for row in drafted],
        )
        drafts = (chain.draft() for chain in chains)
        return [replace(row, draft=next(drafts)) if row.draft.num_deferred else row for row in rows]

    def _pass(self, batch: ForwardBatch, draws: Draws | None, runs: Callable[[], list[Run]]) -> Drawn:
        """Compute a batch; the next draft token of every row is the one that the deciding rank draws."""
        if self._decides:
            drawn = super()._pass(batch, draws, runs)
        else:
            self.backend.run(batch)
            drawn = Drawn(torch.zeros_like(batch.logit_indices))
        return replace(drawn, tokens=self.backend.all_reduce(drawn.tokens))
