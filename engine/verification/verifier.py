"""ModelVerifier: one target pass over all committed tips and drafts of a batch, then the verification rule per row."""

from collections.abc import Callable, Sequence

import torch

from engine.config import EngineConfig
from engine.execution.backend import Backend, PassOutput
from engine.execution.batch import ForwardBatch, build
from engine.execution.forward_row import ForwardRow, depths
from engine.execution.kv_tensors import KVTensors
from engine.protocols import NO_DRAFT, TargetDrafter, Verdict, VerifyRow
from engine.sampling.grammar import Grammars
from engine.sampling.logits import needs_shaping, plan_draws
from engine.verification.decider import Decider, num_logits
from engine.verification.rule import rule_of

MakeTargetDrafter = Callable[[EngineConfig, Backend, KVTensors, Grammars | None], TargetDrafter]
"""Makes the drafter of a target that drafts for itself, over its backend and its KV cache."""


class ModelVerifier:
    """Verifies with a model in this process. It holds only caches: a round's rows bring everything it needs."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        grammars: Grammars | None = None,
        make_drafter: MakeTargetDrafter | None = None,
    ) -> None:
        """Make the KV tensors and the target's own drafter, if any; raise ModelError if it cannot draft for itself."""
        assert config.num_blocks is not None
        self.backend = backend
        self.num_blocks = config.num_blocks + 1
        num_slots, depth = 1 + (config.num_states or 0), config.num_speculative_tokens
        self._kv = backend.allocate_kv(self.num_blocks, config.block_size, num_slots, depth)
        self._decider = Decider(rule_of(config.verification), backend.info.eos_token_ids, grammars)
        self._drafter = None if make_drafter is None else make_drafter(config, backend, self._kv, grammars)

    async def verify(self, rows: Sequence[VerifyRow], *, decides: bool = True) -> list[Verdict]:
        """Compute the rows and, unless another rank decides, return their verdicts."""
        with torch.inference_mode():
            if any(row.draft.num_deferred for row in rows):
                assert self._drafter is not None, "no draft may be left to this target"
                rows = self._drafter.draft(rows, decides=decides)
            batch = build([_forward_row(row) for row in rows], self._kv)
            output, is_drawn = self._forward(rows, batch)
            verdicts = self._decide(rows, output, is_drawn=is_drawn) if decides else []
            self._keep_paths(rows, [verdict.path for verdict in verdicts] or [[]] * len(rows))
            return verdicts

    @property
    def kv(self) -> KVTensors:
        return self._kv

    def release(self, request_id: str) -> None:
        self._decider.release(request_id)

    def _decide(self, rows: Sequence[VerifyRow], output: PassOutput, *, is_drawn: bool) -> list[Verdict]:
        runs = self._decider.runs(rows)
        self.backend.wait()
        drawn = output.tokens.tolist() if is_drawn and runs else None
        return self._decider.decide(rows, runs, output.logits, drawn)

    def _forward(self, rows: Sequence[VerifyRow], batch: ForwardBatch) -> tuple[PassOutput, bool]:
        """Launch the pass; return whether it draws the tokens: not if the rule or a prompt's logprobs need logits."""
        nodes = [(row.request, depth) for row in rows if row.reaches_tip for depth in [0, *depths(row.draft.parents)]]
        params = [request.params for request, _ in nodes]
        draws = None
        if self._decider.rule.shares_noise and len(params) == len(batch.logit_indices):
            positions = [len(request.token_ids) + depth for request, depth in nodes]
            (draws,) = plan_draws(params, positions, self._kv.input_device)
            batch.needs_logits = any(needs_shaping(p) or p.logprobs is not None or p.audits for p in params)
        return self.backend.run(batch, draws), draws is not None

    def _keep_paths(self, rows: Sequence[VerifyRow], paths: Sequence[list[int]]) -> None:
        """Move the keys and values of a branching draft's accepted nodes to the places after the tip.

        A sum gives every rank the paths of the deciding rank.
        """
        branching = [i for i, row in enumerate(rows) if not row.draft.is_chain]
        if not branching:
            return
        # [drafts, nodes] each path, root first, as node index + 1; 0 is padding.
        kept = torch.zeros(len(branching), max(len(rows[i].draft.token_ids) for i in branching), dtype=torch.int64)
        for path, i in zip(kept, branching, strict=True):
            path[: len(paths[i])] = torch.tensor(paths[i], dtype=torch.int64) + 1
        if (reducer := self.backend.reducer) is not None:
            kept = reducer.sum(kept.to(self.backend.device))
        sources: list[int] = []
        targets: list[int] = []
        for i, path in zip(branching, kept.tolist(), strict=True):
            nodes = [node - 1 for node in path if node]
            first = len(rows[i].request.token_ids)
            sources += [self._kv.slot(rows[i].block_ids, first + node) for node in nodes]
            targets += [self._kv.slot(rows[i].block_ids, first + depth) for depth in range(len(nodes))]
            if nodes and (slot := rows[i].slot) is not None:
                self._kv.extras.keep_path(slot, nodes)
        self._kv.move(sources, targets)


def _forward_row(row: VerifyRow) -> ForwardRow:
    tokens = row.request.token_ids[row.start : row.start + row.length]
    draft = row.draft if row.reaches_tip else NO_DRAFT
    return ForwardRow(
        token_ids=tokens + draft.token_ids,
        start=row.start,
        block_ids=row.block_ids,
        num_logits=num_logits(row),
        parents=None if draft.is_chain else draft.parents,
        input_length=row.request.input_length,
        num_draft_tokens=len(draft.token_ids),
        prompt_length=row.request.prompt_length,
        slot=row.slot,
    )
