"""The rejection rule of Leviathan et al. (2211.17192) and Chen et al. (2302.01318), for chains and trees.

A draft token x is accepted with probability min(1, target_probs[x] / draft_probs[x]). After a rejection the target's
row becomes norm([target_probs - draft_probs]+), and the token's next sibling is tried against that; where none is left,
the recovered token is drawn from it. After a full acceptance the bonus token is drawn from the target. With several
siblings this is the recursive rejection sampling of SpecInfer (2305.09781) if they were drawn independently, of Sequoia
(2402.12374, Algorithm 2) if without replacement.

The emitted law is the target's for *any* draft rows, provided each token was sampled from exactly its row, given its
earlier siblings: a sibling drawn without replacement comes with the row that its earlier siblings are missing from. The
drafter samples from its top m tokens only and sends that row. A draft without rows is taken as certain (one-hot).
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
    entries,
    first_rows,
    or_else,
    per_draft,
    residual,
    target_probs_of_nodes,
)


class Rejection:
    """The rejection rule; see `rule.Rule`."""

    needs_draft_rows = True
    shares_noise = False
    independent_siblings = False

    def decide(
        self, logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
    ) -> list[tuple[list[int], list[int]]]:
        """Walk down each draft as far as children are accepted, and draw the token that follows; see `rule.Rule`."""
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
    reduced: dict[int, Tensor] = {}
    rejected: list[Entry] = []
    probs_of_nodes = target_probs_of_nodes(target_probs, drafts)
    walks = zip(drafts, first_rows(drafts), probs_of_nodes, per_draft(coins, drafts), strict=True)
    for request, (draft, start, probs, tossed) in enumerate(walks):
        node, path = -1, list[int]()
        while True:
            siblings = [child for child, parent in enumerate(draft.parents) if parent == node]
            row = target_probs[start + 1 + node]
            child, left = _choose(draft, siblings, row, probs, tossed)
            if child is None:
                break
            path.append(child)
            node = child
        if siblings:
            rejected += entries(draft, siblings[-1], request)
        if left is not row:
            reduced[request] = left
        paths.append(path)
        ends.append(start + 1 + node)
    law = target_probs[torch.tensor(ends, dtype=torch.int64, device=target_probs.device)]
    for request, left in reduced.items():
        law[request] = left
    # The last rejected siblings of all requests are subtracted at once.
    return paths, or_else(residual(law, rejected), law)


def _choose(
    draft: Draft, siblings: Sequence[int], row: Tensor, probs: Sequence[float], tossed: Sequence[float]
) -> tuple[int | None, Tensor]:
    """Return the first sibling that its coin accepts, if any, and what all rejected ones but the last leave of the row.

    Args:
        row: [vocab] the target's, after the siblings' parent.
        probs: [nodes] what that row says about each node's token.
        tossed: [nodes] the coins.
    """
    left = row
    for nth, child in enumerate(siblings):
        if nth:
            left = _without(left, draft, siblings[nth - 1])
        target_prob = float(left[draft.token_ids[child]]) if nth else probs[child]
        # u * draft < target, not u < target / draft: no division, and a token the target never draws is not accepted.
        if tossed[child] * draft_prob(draft, child) < target_prob:
            return child, left
    return None, left


def _without(law: Tensor, draft: Draft, node: int) -> Tensor:
    """Return norm([law - draft]+), [vocab], after a node was rejected; `law` where rounding left nothing."""
    rest = or_else(residual(law.unsqueeze(0), entries(draft, node, 0)), law.unsqueeze(0)).squeeze(0)
    return rest / rest.sum()
