"""Block verification: Sun et al., "Block Verification Accelerates Speculative Decoding" (2403.10444), Algorithm 2.

A draft is accepted up to the last token whose coin falls below its acceptance probability, which depends on the whole
draft up to there: a token that the target likes less than the draft does may be kept for the sake of the tokens before
it. No rule for a single draft accepts more tokens in expectation, and the rejection rule never does. The emitted law is
the target's, if every token was sampled from the row that came with it, in noise that is new in every round.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.protocols import Draft
from engine.sampling.logits import Run
from engine.verification.draft_rows import (
    NodeFacts,
    chain_length,
    decide_by,
    draft_prob,
    entries,
    first_rows,
    or_else,
    read,
    residual,
)


class Block:
    """Block verification, for chains; of a tree it considers only the chain that its first nodes form."""

    needs_draft_rows = True
    shares_noise = False
    independent_siblings = False

    def decide(
        self, logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
    ) -> list[tuple[list[int], list[int]]]:
        """Accept each draft up to the last token that its coin accepts, and draw the token that follows."""
        return decide_by(_paths, logits, runs, drafts)


def accept(target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft]) -> tuple[list[int], Tensor]:
    """Accept each draft up to its last accepted token: the rule itself, a function of the coins alone.

    Args:
        target_probs: [n, vocab] per request the tip's row, then one row per draft token.
        coins: [nodes] a uniform number per draft token.

    Returns:
        Per request the number of accepted tokens, and [requests, vocab] the weights of the token after them, which need
        not sum to 1.
    """
    starts = first_rows(drafts)
    facts = read(target_probs, coins, drafts, lambda draft, node: [draft.token_ids[node]])
    ratios = _ratios(drafts, facts)
    scale = torch.tensor([ratio for row in ratios for ratio in row], dtype=target_probs.dtype)
    subtracted = [
        entry
        for start, draft in zip(starts, drafts, strict=True)
        for node in range(chain_length(draft))
        for entry in entries(draft, node, start + node)
    ]
    rest = residual(scale.to(target_probs.device).unsqueeze(-1) * target_probs, subtracted)
    sums = rest.sum(-1).tolist()
    accepted = []
    for draft, draft_ratios, start, nodes in zip(drafts, ratios, starts, facts, strict=True):
        length = count = chain_length(draft)
        while count:
            ratio, left = draft_ratios[count], sums[start + count]
            # u * (left + 1 - ratio) < left, not u < left / (left + 1 - ratio): both can be 0.
            coin = nodes[count - 1].coin
            if coin * (left + 1 - ratio) < left if count < length else coin < ratio:
                break
            count -= 1
        accepted.append(count)
    ends = torch.tensor([starts, accepted], dtype=torch.int64, device=target_probs.device).sum(0)
    return accepted, or_else(rest[ends], target_probs[ends])


def _paths(target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft]) -> tuple[list[list[int]], Tensor]:
    """Return what `accept` does, with the accepted nodes in place of their number."""
    accepted, weights = accept(target_probs, coins, drafts)
    return [list(range(count)) for count in accepted], weights


def _ratios(drafts: Sequence[Draft], facts: Sequence[Sequence[NodeFacts]]) -> list[list[float]]:
    """Return, per draft and row, the product of target over draft probabilities so far, cut to 1 after each token."""
    ratios = []
    for draft, nodes in zip(drafts, facts, strict=True):
        ratios.append([1.0])
        for node, (target_probs, _) in enumerate(nodes):
            sampled = draft_prob(draft, node)
            target_prob = target_probs[draft.token_ids[node]]
            ratios[-1].append(min(1.0, ratios[-1][-1] * target_prob / sampled) if sampled > 0 else 0.0)
    return ratios
