"""A verification rule of your own: the rejection rule for chains, as short as it can be written.

`serve run deployments:app verification=tests.examples.rule:RULE`, or `LLM(verification="...")`; `check_rule` tries its
law. Remove the subtraction, and it fails.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine import check_rule
from engine.protocols import Draft
from engine.verification.draft_rows import decide_by, draft_row
from engine.verification.rule import Rule


def accept(target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft]) -> tuple[list[list[int]], Tensor]:
    """Accept a prefix of each chain; return these, and the law of the token that follows. See `draft_rows.Accept`."""
    paths, laws, row, coin = [], [], 0, 0
    for draft in drafts:
        path, law = [], target_probs[row]
        for node, token in enumerate(draft.token_ids):
            draft_probs = torch.zeros_like(law)
            ids, probs = draft_row(draft, node)
            draft_probs[ids] = torch.tensor(probs, dtype=law.dtype)
            if coins[coin + node] * draft_probs[token] >= law[token]:
                law = (law - draft_probs).clamp(min=0)
                break
            path.append(node)
            law = target_probs[row + 1 + node]
        paths.append(path)
        laws.append(law)
        row, coin = row + 1 + len(draft.token_ids), coin + len(draft.token_ids)
    return paths, torch.stack(laws)


RULE = Rule(partial(decide_by, accept), needs_draft_rows=True)

if __name__ == "__main__":
    check_rule(RULE)
