"""The coupled rule: the target draws its own token at every node, and the walk descends while a child equals it.

Every emitted token is the target's own draw, with noise of (seed, position, token) alone, so the text does not depend
on the draft. Exact for any chain or tree at any temperature; only token ids travel (Daliri, Musco and Suresh, "Coupling
without Communication and Drafter-Invariant Speculative Decoding").
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.protocols import Difference, Draft
from engine.sampling.logits import Run, draw, needs_shaping, noised, shape
from engine.sampling.top_tokens import copied


def decide(
    logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
) -> list[tuple[list[int], list[int]]]:
    """Draw the target's token at every row, and walk each draft along them; see `rule.Decide`."""
    if is_shaped := drawn is None:
        logits = shape(logits, runs)
        drawn = draw(logits, runs).tolist()
    elif any(needs_shaping(run.params) for run in runs):
        ends = itertools.accumulate(len(run.depths) for run in runs)
        shaped = [(run, end) for run, end in zip(runs, ends, strict=True) if needs_shaping(run.params)]
        rows = [row for run, end in shaped for row in range(end - len(run.depths), end)]
        shaped_runs = [run for run, _ in shaped]
        for row, token in zip(
            rows, draw(shape(logits[copied(rows, logits.device)], shaped_runs), shaped_runs).tolist(), strict=True
        ):
            drawn[row] = token
    decisions, start = [], 0
    for run, draft in zip(runs, drafts, strict=True):
        end = start + 1 + len(draft.token_ids)
        if run.params.audits and draft.token_ids:
            run.differences += _differences(logits[start:end], run, draft, drawn[start:end], is_shaped=is_shaped)
            # The last token is committed as if it followed a draft without it: the next round computes it.
            decisions.append((draft.token_ids, list(range(len(draft.token_ids) - 1))))
        else:
            decisions.append(walk(draft, drawn[start:end]))
        start = end
    return decisions


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


def _differences(logits: Tensor, run: Run, draft: Draft, drawn: Sequence[int], *, is_shaped: bool) -> list[Difference]:
    """Compare a text, which is a chain, with the tokens drawn at its rows."""
    rows = [row for row, token in enumerate(draft.token_ids) if token != drawn[row]]
    if not rows:
        return []
    there = replace(
        run, depths=[run.depths[row] for row in rows], paths=[run.paths[row] for row in rows] if run.paths else ()
    )
    shaped = logits[copied(rows, logits.device)]
    scores = noised(shaped if is_shaped else shape(shaped, [there]), [there])
    tokens = copied([*(drawn[row] for row in rows), *(draft.token_ids[row] for row in rows)], logits.device)
    own, text = scores.gather(-1, tokens.view(2, -1).T).unbind(-1)
    first = run.request.num_output_tokens
    return [
        Difference(first + row, drawn[row], margin) for row, margin in zip(rows, (own - text).tolist(), strict=True)
    ]
