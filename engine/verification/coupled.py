"""The coupled rule: the target draws its own token at every node, and the walk descends while a child equals it.

Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding". Every
emitted token is the target's own draw, made with noise that depends on (seed, position, token) alone, so the
text does not depend on the draft at all. Exact for any draft, chain or tree, at any temperature, and only token
ids travel.
"""

from collections.abc import Sequence

from engine.protocols import Draft


def coupled(drawn: Sequence[int], drafts: Sequence[Draft]) -> list[tuple[list[int], list[int]]]:
    """Decide a batch.

    Args:
        drawn: [n] the target's draws: per request at the tip, then after each draft node.

    Returns:
        Per request, the tokens to commit and the path of accepted nodes.
    """
    verdicts = []
    start = 0
    for draft in drafts:
        verdicts.append(walk(draft, drawn[start : start + 1 + len(draft.token_ids)]))
        start += 1 + len(draft.token_ids)
    return verdicts


def walk(draft: Draft, drawn: Sequence[int]) -> tuple[list[int], list[int]]:
    """Descend from the tip while a child holds the token the target drew at its parent.

    Args:
        drawn: [nodes + 1] the target's draws: at the tip, then after each node.
    """
    children = {
        (parent, token): node
        for node, (token, parent) in reversed(list(enumerate(zip(draft.token_ids, draft.parents, strict=True))))
    }
    node, token = -1, drawn[0]
    tokens, path = [token], []
    while (child := children.get((node, token))) is not None:
        node, token = child, drawn[child + 1]
        path.append(node)
        tokens.append(token)
    return tokens, path
