"""Validation: checks drafts and verdicts from workers before they reach the engine."""

import math
from collections.abc import Sequence

from cluster.protocol.messages import MalformedMessageError
from engine.protocols import Draft, ProposeRow, Verdict, VerifyRow


def check_drafts(drafts: Sequence[Draft], rows: Sequence[ProposeRow], vocab_size: int) -> None:
    """Check that there is one valid draft per row.

    Raises:
        MalformedMessageError: the message names the row and what is wrong with it.
    """
    _check_count(len(drafts), len(rows), "drafts")
    for draft, row in zip(drafts, rows, strict=True):
        if problem := _draft_problem(draft, row.num_draft_tokens, vocab_size):
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


def _draft_problem(draft: Draft, num_requested: int, vocab_size: int) -> str | None:
    length = len(draft.token_ids)
    if length > num_requested:
        return f"{length} tokens, at most {num_requested} requested"
    if draft.num_deferred:
        return "tokens that are left to the target"
    if len(draft.parents) != length:
        return f"{len(draft.parents)} parents for {length} tokens"
    if not _in_vocabulary(draft.token_ids, vocab_size):
        return f"a token id outside 0 to {vocab_size - 1}"
    if not all(-1 <= parent < i for i, parent in enumerate(draft.parents)):
        return "a parent that does not come before its child"
    return _top_problem(draft, vocab_size)


def _top_problem(draft: Draft, vocab_size: int) -> str | None:
    """Check the sparse distributions, which all tokens have or none."""
    ids, probs = draft.top_ids, draft.top_probs
    if ids is None and probs is None:
        return None
    if ids is None or probs is None or not len(ids) == len(probs) == len(draft.token_ids):
        return "distributions for some tokens only"
    for token_id, row_ids, row_probs in zip(draft.token_ids, ids, probs, strict=True):
        if len(row_ids) != len(row_probs) or not _in_vocabulary(row_ids, vocab_size):
            return "a distribution over invalid token ids"
        if token_id not in row_ids:
            return "a token that is not in its distribution"
        if not all(math.isfinite(p) and p >= 0 for p in row_probs):
            return "an invalid probability"
    return None


def _deferred_problem(verdict: Verdict, row: VerifyRow, vocab_size: int) -> str | None:
    """Check what the target drafted itself."""
    if not row.draft.num_deferred:
        return None if verdict.draft is None else "a draft that was not left to it"
    if verdict.draft is None:
        return "no draft, though it was left to it"
    return _draft_problem(verdict.draft, row.draft.num_deferred, vocab_size)


def _verdict_problem(verdict: Verdict, row: VerifyRow, vocab_size: int) -> str | None:
    tokens, path, draft = verdict.token_ids, verdict.path, verdict.draft or row.draft
    if len(verdict.prompt_logprobs) != row.num_prompt_logprobs:
        return f"{len(verdict.prompt_logprobs)} prompt log probabilities, {row.num_prompt_logprobs} requested"
    if not row.reaches_tip:
        return "tokens for an unfinished prefill" if tokens or path else None
    if len(tokens) != len(path) + 1:
        return f"{len(tokens)} tokens after {len(path)} accepted ones"
    if not _in_vocabulary(tokens, vocab_size):
        return f"a token id outside 0 to {vocab_size - 1}"
    parent = -1
    for node, token_id in zip(path, tokens, strict=False):
        if not 0 <= node < len(draft.token_ids) or draft.parents[node] != parent:
            return "a path that is not in the draft"
        if draft.token_ids[node] != token_id:
            return "an accepted token that was not drafted"
        parent = node
    return None


def _in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
