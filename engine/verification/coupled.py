"""The coupled rule: the target draws its own token at every node, and the walk descends while a child equals it.

Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding". Every
emitted token is the target's own draw, made with noise that depends on (seed, position, token) alone, so the
text does not depend on the draft at all. Exact for any draft, chain or tree, at any temperature, and only token
ids travel.
"""

import itertools
from collections.abc import Sequence

from torch import Tensor

from engine.protocols import Draft
from engine.sampling.logits import Run, draw, needs_shaping, shape


class Coupled:
    """The coupled rule, for chains and trees; see `rule.Rule`."""

    needs_draft_rows = False
    shares_noise = True
    independent_siblings = False

    def decide(
        self, logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
    ) -> list[tuple[list[int], list[int]]]:
        """Draw the target's token at every row, and walk each draft along them."""
        tokens = _drawn(logits, drawn, runs)
        decisions = []
        start = 0
        for draft in drafts:
            end = start + 1 + len(draft.token_ids)
            decisions.append(walk(draft, tokens[start:end]))
            start = end
        return decisions


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


def _drawn(logits: Tensor, known: list[int] | None, runs: Sequence[Run]) -> list[int]:
    """Return the target's draw from each row; `known` is what the pass drew, right where nothing needs shaping."""
    if known is None:
        everything: list[int] = draw(shape(logits, runs), runs).tolist()
        return everything
    ends = itertools.accumulate(len(run.depths) for run in runs)
    others = [(run, end) for run, end in zip(runs, ends, strict=True) if needs_shaping(run.params)]
    if others:
        rows = [row for run, end in others for row in range(end - len(run.depths), end)]
        other_runs = [run for run, _ in others]
        for row, token in zip(rows, draw(shape(logits[rows], other_runs), other_runs).tolist(), strict=True):
            known[row] = token
    return known
