"""Decider: the verdicts of a round's rows, from the target's logits, wherever these were computed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.execution.forward_row import depths
from engine.protocols import Draft, TokenLogprobs, Verdict, VerifyRow
from engine.sampling.grammar import Grammars, matcher_of
from engine.sampling.logits import Run
from engine.verification.rule import Rule


class Decider:
    """Applies a verification rule. `end_ids` are the target's end-of-text tokens."""

    def __init__(self, rule: Rule, end_ids: Sequence[int], grammars: Grammars | None = None) -> None:
        self.rule = rule
        self._end_ids = tuple(end_ids)
        self._grammars = grammars

    def release(self, request_id: str) -> None:
        """Drop a request's grammar matcher."""
        if self._grammars is not None:
            self._grammars.release(request_id)

    def runs(self, rows: Sequence[VerifyRow]) -> list[Run]:
        """Return what the rule reads of the rows that reach their tips; the pass may still be running."""
        return [self._run(row) for row in rows if row.reaches_tip]

    def decide(
        self, rows: Sequence[VerifyRow], runs: Sequence[Run], logits: Tensor, drawn: list[int] | None
    ) -> list[Verdict]:
        """Return a verdict for each row.

        Args:
            logits: [n, vocab] float32, `num_logits` for each row; see `rule.Decide` for when it may be empty.
            drawn: see `rule.Decide`.
        """
        verdicts, logits = _read_prompts(rows, logits)
        deciding = [(i, row) for i, row in enumerate(rows) if row.reaches_tip]
        if not deciding:
            return verdicts
        raw = logits.log_softmax(-1) if any(row.request.params.logprobs is not None for _, row in deciding) else None
        decisions = self.rule.decide(logits, runs, [row.draft for _, row in deciding], drawn)
        start = 0
        for (i, row), run, (tokens, path) in zip(deciding, runs, decisions, strict=True):
            logprobs = None
            if raw is not None and (count := row.request.params.logprobs) is not None:
                rows_used = [start, *(start + 1 + node for node in path)]
                logprobs = _logprobs(raw[rows_used], tokens, count)
            prompt_logprobs = verdicts[i].prompt_logprobs
            verdicts[i] = Verdict(tokens, path, logprobs, prompt_logprobs, row.draft, differences=run.differences)
            if run.matcher is not None and run.matcher.error:
                message = f"the grammar is too complex to be followed any further ({run.matcher.error}); simplify it"
                verdicts[i] = Verdict(prompt_logprobs=prompt_logprobs, draft=row.draft, error=message)
            start += 1 + len(row.draft.token_ids)
        return verdicts

    def _run(self, row: VerifyRow) -> Run:
        params = row.request.params
        return Run(
            row.request,
            depths=[0, *depths(row.draft.parents)],
            paths=paths(row.draft) if params.depends_on_path else (),
            end_ids=(*self._end_ids, *params.stop_token_ids),
            matcher=matcher_of(self._grammars, row.request),
        )


def num_logits(row: VerifyRow) -> int:
    """Return how many of a row's last tokens need logits: the tip and the draft, and a prompt's log probabilities."""
    for_prompt = row.length if row.num_prompt_logprobs else 0
    return max(1, for_prompt) + len(row.draft.token_ids) if row.reaches_tip else for_prompt


def _read_prompts(rows: Sequence[VerifyRow], logits: Tensor) -> tuple[list[Verdict], Tensor]:
    """Return verdicts that hold only the prompts' log probabilities, and the logits that the rule needs."""
    if not any(row.num_prompt_logprobs for row in rows):
        return [Verdict()] * len(rows), logits
    verdicts, deciding = [], []
    for row, row_logits in zip(rows, logits.split_with_sizes([num_logits(row) for row in rows]), strict=True):
        if row.reaches_tip:
            deciding.append(row_logits[-1 - len(row.draft.token_ids) :])
        prompt_logprobs: list[TokenLogprobs] = []
        num_top = row.request.params.prompt_logprobs
        if num_top is not None and (count := row.num_prompt_logprobs):
            tokens = row.request.token_ids[row.start + 1 : row.start + 1 + count]
            prompt_logprobs = _logprobs(row_logits[:count].log_softmax(-1), tokens, num_top)
        verdicts.append(Verdict(prompt_logprobs=prompt_logprobs))
    return verdicts, torch.cat(deciding) if deciding else logits[:0]


def paths(draft: Draft) -> list[list[int]]:
    """Return the draft tokens from the tip to each node: [nodes + 1] lists, the tip's own, empty, first."""
    to_node: list[list[int]] = [[]]
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        to_node.append([*to_node[parent + 1], token])
    return to_node


def _logprobs(raw: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Return the target's log probabilities before any shaping. raw: [n, vocab]."""
    chosen = raw.gather(-1, torch.tensor(tokens, device=raw.device).unsqueeze(-1))
    ranks = (raw > chosen).sum(-1) + 1
    top, ids = raw.topk(count, -1) if count else (raw[:, :0], raw[:, :0].long())
    return [
        TokenLogprobs(logprob, rank, top_ids, top_logprobs)
        for logprob, rank, top_ids, top_logprobs in zip(
            chosen.squeeze(-1).tolist(), ranks.tolist(), ids.tolist(), top.tolist(), strict=True
        )
    ]
