"""Validation: checks drafts and verdicts from workers before they reach the engine."""

from collections.abc import Sequence

from cluster.protocol.messages import MalformedMessageError
from engine.drafting.check import check_drafts, draft_problem, in_vocabulary
from engine.errors import DrafterError
from engine.protocols import Draft, ProposeRow, Verdict, VerifyRow


def check_proposal(drafts: Sequence[Draft], rows: Sequence[ProposeRow], vocab_size: int) -> None:
    """Raise MalformedMessageError unless there is one valid draft per row; it names the row and the fault."""
    try:
        check_drafts(drafts, rows, vocab_size)
    except DrafterError as error:
        raise MalformedMessageError(str(error)) from error
    for draft, row in zip(drafts, rows, strict=True):
        if draft.num_deferred:
            raise MalformedMessageError(f"draft of {row.request.request_id}: tokens that are left to the target")


def with_drafts(verdicts: Sequence[Verdict], rows: Sequence[VerifyRow]) -> list[Verdict]:
    """Return the verdicts with their drafts: workers leave out the drafts that the Router sent.

    Raises MalformedMessageError if there is not one verdict per row.
    """
    if len(verdicts) != len(rows):
        raise MalformedMessageError(f"{len(verdicts)} verdicts for {len(rows)} rows")
    return [
        verdict  # `dataclasses.replace` would take three times as long
        if row.draft.num_deferred
        else Verdict(
            verdict.token_ids,
            verdict.path,
            verdict.logprobs,
            verdict.prompt_logprobs,
            row.draft,
            verdict.error,
            verdict.differences,
        )
        for verdict, row in zip(verdicts, rows, strict=True)
    ]


def check_verdicts(verdicts: Sequence[Verdict], rows: Sequence[VerifyRow], vocab_size: int) -> None:
    """Raise MalformedMessageError if a verdict or a draft of the target is invalid; it names the row and the fault."""
    for verdict, row in zip(verdicts, rows, strict=True):
        num_deferred = row.draft.num_deferred
        problem = draft_problem(verdict.draft, num_deferred, vocab_size) if num_deferred else None
        if problem := problem or _verdict_problem(verdict, row, vocab_size):
            raise MalformedMessageError(f"verdict of {row.request.request_id}: {problem}")


def _verdict_problem(verdict: Verdict, row: VerifyRow, vocab_size: int) -> str | None:
    tokens, path, draft = verdict.token_ids, verdict.path, verdict.draft
    if len(verdict.prompt_logprobs) != row.num_prompt_logprobs:
        return f"{len(verdict.prompt_logprobs)} prompt log probabilities, {row.num_prompt_logprobs} requested"
    if not row.reaches_tip:
        return "tokens for an unfinished prefill" if tokens or path else None
    if verdict.error:
        return "tokens beside an error" if tokens or path else None
    if len(tokens) != len(path) + 1:
        return f"{len(tokens)} tokens after {len(path)} accepted ones"
    if not in_vocabulary(tokens, vocab_size):
        return f"a token id outside 0 to {vocab_size - 1}"
    for position, token_id, _ in verdict.differences:
        if not 0 <= position - row.request.num_output_tokens < len(tokens) or not 0 <= token_id < vocab_size:
            return f"a difference from token {token_id} at {position}"
    parent = -1
    for node, token_id in zip(path, tokens, strict=False):
        if not 0 <= node < len(draft.token_ids) or draft.parents[node] != parent:
            return "a path that is not in the draft"
        if draft.token_ids[node] != token_id:
            return "an accepted token that was not drafted"
        parent = node
    return None
