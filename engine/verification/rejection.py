"""The rejection rule of Leviathan et al. (2211.17192) and Chen et al. (2302.01318), for chains and trees.

A draft token x is accepted with probability min(1, target_probs[x] / draft_probs[x]). After a rejection the target's
row becomes norm([target_probs - draft_probs]+), by which the next sibling is tried; after the last sibling, the
recovered token is drawn from it. After a full acceptance the bonus token is drawn from the target. With siblings this
is the recursive rejection sampling of SpecInfer (2305.09781) for independent draws, of Sequoia (2402.12374, Algorithm
2) without replacement.

The emitted law is the target's for *any* draft rows, provided each token was sampled from exactly its row, given its
earlier siblings: without replacement, a row excludes them. The drafter samples from its top m tokens only and sends
that row. A draft without rows is taken as certain (one-hot).
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.protocols import Draft
from engine.verification.draft_rows import NodeFacts, draft_prob, draft_row, walk


def accept(target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft]) -> tuple[list[list[int]], Tensor]:
    """Accept a path of each draft; see `draft_rows.Accept`."""
    return walk(target_probs, coins, drafts, _choose, _tokens)


def _choose(draft: Draft, siblings: Sequence[int], nodes: Sequence[NodeFacts]) -> tuple[list[int], Mapping[int, float]]:
    """Choose the first sibling that its coin accepts; see `draft_rows.Choose`.

    With `scale` as the sum before normalising, [[target - subtracted]+ / scale - draft]+ is proportional to
    [target - (subtracted + scale * draft)]+. Only tokens of draft rows are subtracted from, so only these are read.
    """
    subtracted: dict[int, float] = {}
    known: dict[int, float] = {}
    scale = 1.0
    for child in siblings:
        known |= nodes[child].target_probs
        token = draft.token_ids[child]
        # u * draft < target, not u < target / draft: no division, and a token the target never draws is not accepted.
        if nodes[child].coin * draft_prob(draft, child) * scale < known[token] - subtracted.get(token, 0.0):
            return [child], {}
        row = [(token, scale * prob) for token, prob in zip(*draft_row(draft, child), strict=True)]
        if len(siblings) > 1:
            overlap = sum(min(prob, max(known[token] - subtracted.get(token, 0.0), 0.0)) for token, prob in row)
            if overlap >= scale:
                continue  # rounding alone rejected it: nothing would be left
            scale -= overlap
        for token, prob in row:
            subtracted[token] = subtracted.get(token, 0.0) + prob
    return [], subtracted


def _tokens(draft: Draft, node: int) -> list[int]:
    """Return a node's token and, if it has siblings, all tokens of its draft row."""
    has_siblings = draft.parents.count(draft.parents[node]) > 1
    return [draft.token_ids[node], *(draft_row(draft, node)[0] if has_siblings else ())]
