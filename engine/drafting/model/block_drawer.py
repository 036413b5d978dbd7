"""BlockDrawer: draws several places after the last committed token from one pass over it and masks."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.token_drawer import Chain, Drawn, TokenDrawer, extend
from engine.execution.batch import MAX_GROUPED_LENGTH, ForwardBatch, build
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import Reducer
from engine.protocols import Request
from engine.sampling.top_tokens import copied


class BlockDrawer(TokenDrawer):
    """Draws blocks; each token is drawn with the noise of its own position.

    Where a Markov head, a grammar or penalties depend on earlier tokens, the tokens of a block are drawn in order.
    """

    draws_chains = False

    def __init__(self, draft: DraftModel, kv: KVTensors, config: EngineConfig, reducer: Reducer | None = None) -> None:
        """Draw on every rank of `reducer`, which gives all of them the deciding rank's tokens."""
        super().__init__(draft, kv, config)
        self._module = cast("Any", draft.backend.model.module)
        self._reducer = reducer
        # A longer row may be cut, and its parts would not attend to each other.
        longest = MAX_GROUPED_LENGTH - self._module.num_unread
        self._max_length: int = min(longest, self._module.config.max_draft_tokens)

    def blocks(
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        counts: Sequence[int],
        *,
        decides: bool = True,
    ) -> list[Chain]:
        """Return up to `counts[i]` tokens after request i, which is cached up to `starts[i]`.

        `tables` are the requests' block tables, with room for the new tokens.
        """
        counts, rows = [min(count, self._max_length) for count in counts], []
        for request, start, table, count in zip(requests, starts, tables, counts, strict=True):
            masks = [self._module.config.mask_token_id] * (self._module.num_unread + count - 1)
            rows.append(ForwardRow([*request.token_ids[start:], *masks], start, table, count))
        steps = self._steps(build(rows, self._kv), requests, counts, decides=decides)
        if self._reducer is not None:
            tokens = self._reducer.sum(torch.stack([step.tokens for step in steps]))
            steps = [replace(step, tokens=row) for step, row in zip(steps, tokens, strict=True)]
        self._backend.wait()
        chains = [Chain() for _ in requests]
        extend(chains, steps, range(len(chains)), counts)
        return chains

    def _steps(
        self, batch: ForwardBatch, requests: Sequence[Request], counts: Sequence[int], *, decides: bool
    ) -> list[Drawn]:
        """Draw the tokens of all rows, step by step; a shorter row repeats its last place, and the caller cuts it."""
        depths = [list(range(count)) for count in counts]
        (draws,), markov = self.plan(requests, depths), self._module.markov_head
        batch.needs_logits = draws is None or markov is not None
        output = self._backend.run(batch, draws)
        ends, device = list(itertools.accumulate(counts)), output.tokens.device
        places = [end - max(1, count - i) for i in range(max(counts)) for end, count in zip(ends, counts, strict=True)]
        index = copied(places, device).view(-1, len(counts))
        if not decides:
            return [Drawn(torch.zeros_like(rows)) for rows in index]
        steps: list[Drawn] = []

        def paths() -> list[list[list[int]]]:
            tokens = torch.stack([step.tokens for step in steps], 1).tolist() if steps else [[]] * len(counts)
            return [[path] for path in tokens]

        if markov is None and not any(request.params.depends_on_path for request in requests):
            runs = self.runs(requests, depths, paths)
            drawn = self._draw(output.logits, runs) if draws is None else Drawn(output.tokens)
            return [_at(drawn, rows) for rows in index]
        scores, state = output.logits if draws is None else output.scores, None
        temperatures = (torch.ones(ends[-1], 1) if draws is None else draws.temperatures).to(device)
        hidden = self._hidden(batch) if markov is not None and markov.reads_hidden else None
        previous = copied([request.token_ids[-1] for request in requests], device)
        for depth, rows in enumerate(index):
            logits = scores[rows]
            if markov is not None:
                bias, state = markov(previous, None if hidden is None else hidden[rows], state)
                bias, ids = bias / temperatures[rows], self._module.target_ids
                logits = logits + bias if ids is None else logits.index_add(-1, ids, bias)
            drawn = Drawn(logits.argmax(-1))
            if draws is None:
                drawn = self._draw(logits, self.runs(requests, [[depth]] * len(counts), paths))
            steps.append(drawn)
            previous = drawn.tokens
        return steps

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        """Return the predicting places' last hidden vectors, which the pass has written to the states."""
        assert self._kv.states is not None
        slots = batch.paged.slots[batch.logit_indices].to(self._kv.states.device)
        return self._kv.states.flatten(0, 1)[slots]


def _at(drawn: Drawn, rows: Tensor) -> Drawn:
    return Drawn(drawn.tokens[rows], None if drawn.top is None else (drawn.top[0][rows], drawn.top[1][rows]))
