"""Checks drafts before anything is computed for them: a malformed draft would spoil a pass, or bias the text."""

from collections.abc import Sequence

from engine.errors import DrafterError
from engine.protocols import Draft, ProposeRow

_TOLERANCE = 1e-3
"""How far a row's sum may be from 1, because probabilities may be half precision."""


def check_drafts(drafts: Sequence[Draft], rows: Sequence[ProposeRow], vocab_size: int) -> None:
    """Raise DrafterError unless each row has a valid draft of at most `num_draft_tokens` tokens."""
    if len(drafts) != len(rows):
        raise DrafterError(f"{len(drafts)} drafts for {len(rows)} rows")
    for draft, row in zip(drafts, rows, strict=True):
        if (problem := draft_problem(draft, row.num_draft_tokens, vocab_size)) is not None:
            raise DrafterError(f"draft of {row.request.request_id}: {problem}")


def draft_problem(draft: Draft, num_requested: int, vocab_size: int) -> str | None:
    """Return the fault of a draft; None if it is a tree of at most `num_requested` tokens with valid rows."""
    length = len(draft.token_ids)
    if length + draft.num_deferred > num_requested:
        return f"{length + draft.num_deferred} tokens, at most {num_requested} requested"
    if len(draft.parents) != length:
        return f"{len(draft.parents)} parents for {length} tokens"
    if not in_vocabulary(draft.token_ids, vocab_size):
        return f"a token id outside 0 to {vocab_size - 1}"
    if not all(-1 <= parent < node for node, parent in enumerate(draft.parents)):
        return "a parent that does not come before its child"
    return _row_problem(draft, vocab_size)


def in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Return whether all token ids are in a vocabulary."""
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


def _row_problem(draft: Draft, vocab_size: int) -> str | None:
    rows, probs = draft.top_ids, draft.top_probs
    if rows is None and probs is None:
        return None
    if rows is None or probs is None or not len(rows) == len(probs) == len(draft.token_ids):
        return "distributions for some tokens only"
    for token_id, row_ids, row_probs in zip(draft.token_ids, rows, probs, strict=True):
        if len(row_ids) != len(row_probs) or not in_vocabulary(row_ids, vocab_size):
            return "a distribution over invalid token ids"
        if len(set(row_ids)) != len(row_ids):
            return "a distribution that names a token twice"
        if token_id not in row_ids:
            return "a token that is not in its distribution"
        # Written so that nan is refused, too: every comparison with it is false.
        if not (min(row_probs) >= 0 and abs(sum(row_probs) - 1) <= _TOLERANCE):
            return f"probabilities that are negative, or that sum to {sum(row_probs):g} instead of 1"
        if row_probs[row_ids.index(token_id)] == 0:
            return "a token that cannot have been sampled, since its probability is 0"
    return None
