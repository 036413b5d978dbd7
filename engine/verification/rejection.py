"""The rejection rule of Leviathan et al. (2211.17192) and Chen et al. (2302.01318), with sparse draft rows.

A draft token x is accepted with probability min(1, target_probs[x] / draft_probs[x]). At the first rejection the
recovered token is drawn from norm([target_probs - draft_probs]+); after a full acceptance the bonus token is
drawn from the target. The emitted law is the target's for *any* draft_probs, provided the token was sampled from
exactly them: the drafter samples from its top m tokens only and sends that row. A draft without rows is taken as
certain (one-hot).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import noise
from engine.draft import Draft
from engine.logits import Run, gumbel_rows, probabilities


def rejection(shaped: Tensor, runs: Sequence[Run], drafts: Sequence[Draft]) -> list[tuple[list[int], list[int]]]:
    """Decide a batch of chains.

    Args:
        shaped: [n, vocab] from `logits.shape`; per request the tip's row, then one row per draft token.

    Returns:
        Per request, the tokens to commit and the path of accepted nodes.
    """
    target_probs = probabilities(shaped, runs)
    coins = _coins(runs, shaped.device)
    starts, accepted = [], []
    start = 0
    for draft in drafts:
        starts.append(start)
        accepted.append(_num_accepted(draft, target_probs[start:], coins[start:]))
        start += 1 + len(draft.token_ids)
    last = [start + count for start, count in zip(starts, accepted, strict=True)]
    law = target_probs[torch.tensor(last, device=shaped.device)]
    for row, (draft, count) in enumerate(zip(drafts, accepted, strict=True)):
        if count < len(draft.token_ids):
            _subtract_draft(law[row], draft, count)
    ends = [
        Run(run.params, run.token_ids, run.prompt_length, [run.depths[count]])
        for run, count in zip(runs, accepted, strict=True)
    ]
    final = (law.log() + gumbel_rows(ends, law, noise.RESIDUAL_STREAM)).argmax(-1).tolist()
    return [
        ([*draft.token_ids[:count], token], list(range(count)))
        for draft, count, token in zip(drafts, accepted, final, strict=True)
    ]


def _coins(runs: Sequence[Run], device: torch.device) -> Tensor:
    """Return one uniform number per row, [n]."""
    positions = [position for run in runs for position in run.positions]
    seeds = [run.params.seed or 0 for run in runs for _ in run.depths]
    keys = noise.keys(seeds, positions, noise.ACCEPT_STREAM, device)
    return noise.uniform(keys, torch.zeros(1, dtype=torch.int32, device=device)).squeeze(-1)


def _num_accepted(draft: Draft, target_probs: Tensor, coins: Tensor) -> int:
    """Return how many draft tokens stay: all before the first rejection."""
    count = len(draft.token_ids)
    if count == 0:
        return 0
    ids = torch.tensor(draft.token_ids, device=target_probs.device)
    target = target_probs[:count].gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    # u * draft < target, not u < target / draft: no division, and a token the target never draws is never accepted.
    kept = coins[:count] * _draft_probs(draft, target.device) < target
    return int(kept.long().cumprod(0).sum())


def _draft_probs(draft: Draft, device: torch.device) -> Tensor:
    """Return the probability each draft token was sampled with, [k]."""
    if draft.top_ids is None or draft.top_probs is None:
        return torch.ones(len(draft.token_ids), device=device)
    sampled = [
        sum(prob for top, prob in zip(ids, probs, strict=True) if top == token)
        for token, ids, probs in zip(draft.token_ids, draft.top_ids, draft.top_probs, strict=True)
    ]
    return torch.tensor(sampled, device=device)


def _subtract_draft(law: Tensor, draft: Draft, position: int) -> None:
    """Turn the target's row into the residual, in place. An empty residual (rounding only) leaves the target's row."""
    if draft.top_ids is None or draft.top_probs is None:
        ids, probs = [draft.token_ids[position]], [1.0]
    else:
        ids, probs = draft.top_ids[position], draft.top_probs[position]
    residual = law.clone()
    residual.index_add_(0, torch.tensor(ids, device=law.device), -torch.tensor(probs, device=law.device))
    residual.clamp_(min=0)
    if residual.sum() > 0:
        law.copy_(residual)
