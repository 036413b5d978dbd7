"""K-sequential selection: Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport" (2310.15141).

Several drafts of one request were sampled independently. Of the k tokens that they propose next, the first one is taken
for which `coin * division * draft_prob < target_prob`; the drafts that begin with it go on. If none is taken, the token
is drawn from what they leave of the target's row. The division factor (the paper's rho, elsewhere gamma) is the
smallest one for which that is not negative: the root of `1 - (1 - overlap)^k = division * overlap`, where `overlap` is
`sum(min(draft_probs, target_probs / division))`. It is 1 for a single draft, which is the rejection rule.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.protocols import Draft
from engine.sampling.logits import Run
from engine.verification.draft_rows import (
    Entry,
    decide_by,
    draft_prob,
    draft_row,
    first_rows,
    or_else,
    read,
    residual,
)


class KSequential:
    """K-sequential selection among chains from one tip; nodes with the same tokens before them count as one set."""

    needs_draft_rows = True
    shares_noise = False
    independent_siblings = True

    def decide(
        self, logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
    ) -> list[tuple[list[int], list[int]]]:
        """Follow the drafts as long as one of their tokens is taken, and draw the token that follows."""
        return decide_by(accept, logits, runs, drafts)


def accept(target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft]) -> tuple[list[list[int]], Tensor]:
    """Accept a path of each draft: the rule itself, a function of the coins alone.

    Args:
        target_probs: [n, vocab] per request the tip's row, then one row per draft token.
        coins: [nodes] a uniform number per draft token.

    Returns:
        Per request the path of accepted nodes, root first, and [requests, vocab] the weights of the token after them,
        which need not sum to 1.
    """
    paths: list[list[int]] = []
    ends: list[int] = []
    subtracted: list[Entry] = []
    facts = read(target_probs, coins, drafts, lambda draft, node: draft_row(draft, node)[0])
    for request, (draft, start, nodes) in enumerate(zip(drafts, first_rows(drafts), facts, strict=True)):
        equals, taken = [-1], -1
        while candidates := [node for node, parent in enumerate(draft.parents) if parent in equals]:
            ids, probs = draft_row(draft, candidates[0])
            token_probs = nodes[candidates[0]].target_probs
            targets = [token_probs[token] for token in ids]
            factor = division(probs, targets, len(candidates))
            accepted = next(
                (
                    node
                    for node in candidates
                    if nodes[node].coin * factor * draft_prob(draft, node) < token_probs.get(draft.token_ids[node], 0.0)
                ),
                None,
            )
            if accepted is None:
                share = _share(probs, targets, factor, len(candidates))
                subtracted += [
                    Entry(request, token, min(prob, target / factor) * share)
                    for token, prob, target in zip(ids, probs, targets, strict=True)
                ]
                break
            equals = [node for node in candidates if draft.token_ids[node] == draft.token_ids[accepted]]
            taken = accepted
        paths.append(_path(draft, taken))
        ends.append(start + 1 + taken)
    law = target_probs[torch.tensor(ends, dtype=torch.int64, device=target_probs.device)]
    return paths, or_else(residual(law, subtracted), law)


def division(draft_probs: Sequence[float], target_probs: Sequence[float], count: int) -> float:
    """Return the division factor for `count` independent drafts, rounded up; see the module.

    Args:
        draft_probs, target_probs: [m] for the tokens that the drafts can have.
    """
    low, high = 1.0, float(count)
    while high - low > 1e-15 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        overlap = _overlap(draft_probs, target_probs, middle)
        if 1 - (1 - overlap) ** count > middle * overlap:
            low = middle
        else:
            high = middle
    return high


def _overlap(draft_probs: Sequence[float], target_probs: Sequence[float], factor: float) -> float:
    return sum(min(draft, target / factor) for draft, target in zip(draft_probs, target_probs, strict=True))


def _share(draft_probs: Sequence[float], target_probs: Sequence[float], factor: float, count: int) -> float:
    """Return P(a token is taken) / P(the first one is)."""
    overlap = _overlap(draft_probs, target_probs, factor)
    return (1 - (1 - overlap) ** count) / overlap if overlap else 0.0


def _path(draft: Draft, node: int) -> list[int]:
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        node = draft.parents[node]
    return nodes[::-1]
