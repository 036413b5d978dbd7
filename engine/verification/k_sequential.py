"""K-sequential selection: Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport" (2310.15141).

Several drafts of one request were sampled independently. Of the k tokens that they propose next, the first with `coin *
division * draft_prob < target_prob` is taken; the drafts that begin with it continue. If no token is taken, one is
drawn from the residual of the target's row. The division factor (the paper's rho, elsewhere gamma) is the smallest
factor whose residual is not negative: the root of `1 - (1 - overlap)^k = division * overlap`, where `overlap` is
`sum(min(draft_probs, target_probs / division))`. It is 1 for a single draft, which is the rejection rule.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.protocols import Draft
from engine.verification.draft_rows import NodeFacts, draft_prob, draft_row, walk


def accept(target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft]) -> tuple[list[list[int]], Tensor]:
    """Accept a path of each draft; nodes after the same tokens are siblings. See `draft_rows.Accept`."""
    return walk(target_probs, coins, drafts, _choose, lambda draft, node: draft_row(draft, node)[0])


def _choose(
    draft: Draft, candidates: Sequence[int], nodes: Sequence[NodeFacts]
) -> tuple[list[int], Mapping[int, float]]:
    """Choose the first candidate that its coin accepts, and all candidates with its token; see `draft_rows.Choose`."""
    if not candidates:
        return [], {}
    count = len(candidates)
    ids, probs = draft_row(draft, candidates[0])
    token_probs = nodes[candidates[0]].target_probs
    targets = [token_probs[token] for token in ids]
    factor = division(probs, targets, count)
    for node in candidates:
        token = draft.token_ids[node]
        if nodes[node].coin * factor * draft_prob(draft, node) < token_probs.get(token, 0.0):
            return [node, *(equal for equal in candidates if draft.token_ids[equal] == token)], {}
    overlap = _overlap(probs, targets, factor)
    # P(any candidate is taken) / P(the first candidate is taken).
    share = (1 - (1 - overlap) ** count) / overlap if overlap else 0.0
    return [], {
        token: min(prob, target / factor) * share for token, prob, target in zip(ids, probs, targets, strict=True)
    }


def division(draft_probs: Sequence[float], target_probs: Sequence[float], count: int) -> float:
    """Return the division factor, rounded up, for `count` independent drafts over m tokens with these probabilities."""
    low, high = 1.0, float(count)
    while high - low > 1e-15 * high:
        middle = (low + high) / 2
        overlap = _overlap(draft_probs, target_probs, middle)
        if 1 - (1 - overlap) ** count > middle * overlap:
            low = middle
        else:
            high = middle
    return high


def _overlap(draft_probs: Sequence[float], target_probs: Sequence[float], factor: float) -> float:
    return sum(min(draft, target / factor) for draft, target in zip(draft_probs, target_probs, strict=True))
