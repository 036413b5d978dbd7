"""The coupled rule: the target draws its own token at every node, and the walk descends while a child equals it.

Every emitted token is the target's own draw, with noise of (seed, position, token) alone, so the text does not depend
on the draft. Exact for any chain or tree at any temperature; only token ids travel (Daliri, Musco and Suresh, "Coupling
without Communication and Drafter-Invariant Speculative Decoding").
"""

import itertools
from collections.abc import Sequence

from torch import Tensor

from engine.protocols import Draft
from engine.sampling.logits import Run, draw, needs_shaping, shape
from engine.sampling.top_tokens import copied


def decide(
    logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
) -> list[tuple[list[int], list[int]]]:
    """Draw the target's token at every row, and walk each draft along them; see `rule.Decide`."""
    if drawn is None:
        drawn = draw(shape(logits, runs), runs).tolist()
    elif any(needs_shaping(run.params) for run in runs):
        ends = itertools.accumulate(len(run.depths) for run in runs)
        shaped = [(run, end) for run, end in zip(runs, ends, strict=True) if needs_shaping(run.params)]
        rows = [row for run, end in shaped for row in range(end - len(run.depths), end)]
        shaped_runs = [run for run, _ in shaped]
        for row, token in zip(
            rows, draw(shape(logits[copied(rows, logits.device)], shaped_runs), shaped_runs).tolist(), strict=True
        ):
            drawn[row] = token
    tokens = iter(drawn)
    return [walk(draft, list(itertools.islice(tokens, 1 + len(draft.token_ids)))) for draft in drafts]


def walk(draft: Draft, drawn: Sequence[int]) -> tuple[list[int], list[int]]:
    """Descend from the tip while a child holds the token `drawn` at its parent: [nodes + 1], the tip's first."""
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
