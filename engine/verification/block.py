"""Block verification: Sun et al., "Block Verification Accelerates Speculative Decoding" (2403.10444), Algorithm 2.

A draft is accepted up to the last token whose coin falls below its acceptance probability, which depends on the whole
draft before it: likely tokens can make up for a less likely token. No rule for a single draft accepts more tokens in
expectation. The text has the target's law if every token was sampled from its draft row, in noise of its round.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.protocols import Draft
from engine.verification.draft_rows import draft_prob, draft_row, first_rows, or_else, read, residual


def accept(target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft]) -> tuple[list[list[int]], Tensor]:
    """Accept each draft up to its last accepted token; of a tree, only the chain of its first nodes; see `Accept`."""
    starts = first_rows(drafts)
    lengths = [_chain_length(draft) for draft in drafts]
    facts = read(target_probs, coins, drafts, lambda draft, node: [draft.token_ids[node]])
    ratios = []  # per draft and row, the product of target over draft probabilities so far, cut to 1 after each token
    for draft, nodes in zip(drafts, facts, strict=True):
        ratios.append([1.0])
        for node, (probs, _) in enumerate(nodes):
            sampled = draft_prob(draft, node)
            ratios[-1].append(min(1.0, ratios[-1][-1] * probs[draft.token_ids[node]] / sampled) if sampled > 0 else 0.0)
    scale = torch.tensor([ratio for row in ratios for ratio in row], dtype=target_probs.dtype)
    subtracted = [
        (start + node, token, prob)
        for start, draft, length in zip(starts, drafts, lengths, strict=True)
        for node in range(length)
        for token, prob in zip(*draft_row(draft, node), strict=True)
    ]
    left_over = residual(scale.to(target_probs.device).unsqueeze(-1) * target_probs, subtracted)
    sums = left_over.sum(-1).tolist()
    accepted = []
    for draft_ratios, length, start, nodes in zip(ratios, lengths, starts, facts, strict=True):
        count = length
        while count:
            ratio, left, coin = draft_ratios[count], sums[start + count], nodes[count - 1].coin
            # u * (left + 1 - ratio) < left, not u < left / (left + 1 - ratio), which can divide 0 by 0.
            if coin * (left + 1 - ratio) < left if count < length else coin < ratio:
                break
            count -= 1
        accepted.append(count)
    ends = torch.tensor([starts, accepted], dtype=torch.int64, device=target_probs.device).sum(0)
    return [list(range(count)) for count in accepted], or_else(left_over[ends], target_probs[ends])


def _chain_length(draft: Draft) -> int:
    return next((i for i, parent in enumerate(draft.parents) if parent != i - 1), len(draft.parents))
