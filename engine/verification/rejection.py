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

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.protocols import Draft
from engine.sampling.logits import Run
from engine.verification.draft_rows import (
    Entry,
    NodeFacts,
    decide_by,
    draft_prob,
    draft_row,
    first_rows,
    or_else,
    read,
    residual,
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
    rejected: list[Entry] = []
    facts = read(target_probs, coins, drafts, _tokens)
    for request, (draft, start, nodes) in enumerate(zip(drafts, first_rows(drafts), facts, strict=True)):
        path: list[int] = []
        while True:
            tip = path[-1] if path else -1
            siblings = [child for child, parent in enumerate(draft.parents) if parent == tip]
            child, subtracted = _choose(draft, siblings, nodes)
            if child is None:
                break
            path.append(child)
        rejected += [Entry(request, token, prob) for token, prob in subtracted.items()]
        paths.append(path)
        ends.append(start + 1 + tip)
    law = target_probs[torch.tensor(ends, dtype=torch.int64, device=target_probs.device)]
    return paths, or_else(residual(law, rejected), law)


def _choose(
    draft: Draft, siblings: Sequence[int], nodes: Sequence[NodeFacts]
) -> tuple[int | None, Mapping[int, float]]:
    """Return the first sibling that its coin accepts, if any, and what the rejected ones take from the target's row.

    After some rejections the row is norm([target - subtracted]+): with `scale` as the sum before normalising,
    [[target - subtracted]+ / scale - draft]+ is proportional to [target - (subtracted + scale * draft)]+. Only tokens
    of draft rows are ever subtracted from, so these alone are looked at.
    """
    subtracted: dict[int, float] = {}
    known: dict[int, float] = {}
    scale = 1.0
    for child in siblings:
        known |= nodes[child].target_probs
        token = draft.token_ids[child]
        # u * draft < target, not u < target / draft: no division, and a token the target never draws is not accepted.
        if nodes[child].coin * draft_prob(draft, child) * scale < known[token] - subtracted.get(token, 0.0):
            return child, {}
        row = [(token, scale * prob) for token, prob in zip(*draft_row(draft, child), strict=True)]
        if len(siblings) > 1:
            overlap = sum(min(prob, max(known[token] - subtracted.get(token, 0.0), 0.0)) for token, prob in row)
            if overlap >= scale:
                continue  # rounding alone rejected it: nothing would be left
            scale -= overlap
        for token, prob in row:
            subtracted[token] = subtracted.get(token, 0.0) + prob
    return None, subtracted


def _tokens(draft: Draft, node: int) -> list[int]:
    """Return a node's token and, if it has siblings, all tokens of its row, to know what its rejection leaves."""
    has_siblings = draft.parents.count(draft.parents[node]) > 1
    return [draft.token_ids[node], *(draft_row(draft, node)[0] if has_siblings else ())]
