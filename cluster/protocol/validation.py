"""Validation: checks drafts and verdicts from workers before they reach the engine."""

from collections.abc import Sequence

from cluster.protocol.messages import MalformedMessageError
from engine.drafting.check import draft_problem, in_vocabulary
from engine.protocols import Draft, ProposeRow, Verdict, VerifyRow


def check_drafts(drafts: Sequence[Draft], rows: Sequence[ProposeRow], vocab_size: int) -> None:
    """Check that there is one valid draft per row.

    Raises:
        MalformedMessageError: the message names the row and what is wrong with it.
    """
    _check_count(len(drafts), len(rows), "drafts")
    for draft, row in zip(drafts, rows, strict=True):
        left = "tokens that are left to the target" if draft.num_deferred else None
        if problem := left or draft_problem(draft, row.num_draft_tokens, vocab_size):
            raise MalformedMessageError(f"draft of {row.request.request_id}: {problem}")


def check_verdicts(verdicts: Sequence[Verdict], rows: Sequence[VerifyRow], vocab_size: int) -> None:
    """Check that there is one valid verdict per row.

    Raises:
        MalformedMessageError: the message names the row and what is wrong with it.
    """
    _check_count(len(verdicts), len(rows), "verdicts")
    for verdict, row in zip(verdicts, rows, strict=True):
        if problem := _deferred_problem(verdict, row, vocab_size) or _verdict_problem(verdict, row, vocab_size):
            raise MalformedMessageError(f"verdict of {row.request.request_id}: {problem}")


def _check_count(count: int, num_rows: int, plural: str) -> None:
    if count != num_rows:
        raise MalformedMessageError(f"{count} {plural} for {num_rows} rows")


def _deferred_problem(verdict: Verdict, row: VerifyRow, vocab_size: int) -> str | None:
    """Check what the target drafted itself."""
    if not row.draft.num_deferred:
        return None if verdict.draft is None else "a draft that was not left to it"
    if verdict.draft is None:
        return "no draft, though it was left to it"
    return draft_problem(verdict.draft, row.draft.num_deferred, vocab_size)


def _verdict_problem(verdict: Verdict, row: VerifyRow, vocab_size: int) -> str | None:
    tokens, path, draft = verdict.token_ids, verdict.path, verdict.draft or row.draft
    if len(verdict.prompt_logprobs) != row.num_prompt_logprobs:
        return f"{len(verdict.prompt_logprobs)} prompt log probabilities, {row.num_prompt_logprobs} requested"
    if not row.reaches_tip:
        return "tokens for an unfinished prefill" if tokens or path else None
    if len(tokens) != len(path) + 1:
        return f"{len(tokens)} tokens after {len(path)} accepted ones"
    if not in_vocabulary(tokens, vocab_size):
        return f"a token id outside 0 to {vocab_size - 1}"
    parent = -1
    for node, token_id in zip(path, tokens, strict=False):
        if not 0 <= node < len(draft.token_ids) or draft.parents[node] != parent:
            return "a path that is not in the draft"
        if draft.token_ids[node] != token_id:
            return "an accepted token that was not drafted"
        parent = node
    return None
