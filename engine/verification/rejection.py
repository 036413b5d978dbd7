"""The rejection rule of Leviathan et al. (2211.17192) and Chen et al. (2302.01318), with sparse draft rows.

A draft token x is accepted with probability min(1, target_probs[x] / draft_probs[x]). At the first rejection the
recovered token is drawn from norm([target_probs - draft_probs]+); after a full acceptance the bonus token is
drawn from the target. The emitted law is the target's for *any* draft_probs, provided the token was sampled from
exactly them: the drafter samples from its top m tokens only and sends that row. A draft without rows is taken as
certain (one-hot).
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.protocols import Draft
from engine.sampling import noise
from engine.sampling.logits import Run, gumbel_rows, probabilities, shape


class Rejection:
    """The rejection rule, for chains; of a tree it considers only the chain that its first nodes form."""

    needs_draft_rows = True
    shares_noise = False

    def decide(
        self, logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
    ) -> list[tuple[list[int], list[int]]]:
        """Accept each draft up to its first rejected token, and draw the token that follows; see `rule.Rule`."""
        shaped = shape(logits, runs)
        accepted, law = accept(probabilities(shaped, runs), _coins(runs, shaped.device), drafts)
        ends = [Run(run.request, [run.depths[count]]) for run, count in zip(runs, accepted, strict=True)]
        final = (law.log() + gumbel_rows(ends, law, noise.RESIDUAL_STREAM)).argmax(-1).tolist()
        return [
            ([*draft.token_ids[:count], token], list(range(count)))
            for draft, count, token in zip(drafts, accepted, final, strict=True)
        ]


def accept(target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft]) -> tuple[list[int], Tensor]:
    """Accept each draft up to its first rejected token: the rule itself, a function of the coins alone.

    Args:
        target_probs: [n, vocab] per request the tip's row, then one row per draft token.
        coins: [n] uniform numbers; that of a request's last row is not used.

    Returns:
        Per request the number of accepted tokens, and [requests, vocab] the weights of the token after them, which need
        not sum to 1.
    """
    device = target_probs.device
    lengths = [_chain_length(draft) for draft in drafts]
    starts = list(itertools.accumulate((1 + len(draft.token_ids) for draft in drafts), initial=0))[:-1]
    rows = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    tokens = [token for draft, length in zip(drafts, lengths, strict=True) for token in draft.token_ids[:length]]
    sampled = [_draft_prob(draft, i) for draft, length in zip(drafts, lengths, strict=True) for i in range(length)]
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=device)
    draft_probs = torch.tensor(sampled, dtype=target_probs.dtype, device=device)
    # u * draft < target, not u < target / draft: no division, and a token the target never draws is never accepted.
    kept: list[bool] = (coins[index[0]] * draft_probs < target_probs[index[0], index[1]]).tolist()
    accepted, first = [], 0
    for length in lengths:
        accepted.append([*kept[first : first + length], False].index(False))
        first += length
    law = target_probs[torch.tensor([starts, accepted], dtype=torch.int64, device=device).sum(0)]
    rejected = [
        (row, token, prob)
        for row, (draft, count, length) in enumerate(zip(drafts, accepted, lengths, strict=True))
        if count < length
        for token, prob in zip(*_draft_row(draft, count), strict=True)
    ]
    return accepted, _residual(law, rejected) if rejected else law


def _coins(runs: Sequence[Run], device: torch.device) -> Tensor:
    """Return one uniform number per row, [n]."""
    positions = [position for run in runs for position in run.positions]
    seeds = [run.params.seed or 0 for run in runs for _ in run.depths]
    keys = noise.keys(seeds, positions, noise.ACCEPT_STREAM, device)
    return noise.uniform(keys, torch.zeros(1, dtype=torch.int32, device=device)).squeeze(-1)


def _chain_length(draft: Draft) -> int:
    """Return the length of the chain that a draft begins with."""
    return next((i for i, parent in enumerate(draft.parents) if parent != i - 1), len(draft.parents))


def _draft_row(draft: Draft, position: int) -> tuple[list[int], list[float]]:
    """Return the ids and probabilities that a draft token was sampled from."""
    if draft.top_ids is None or draft.top_probs is None:
        return [draft.token_ids[position]], [1.0]
    return draft.top_ids[position], draft.top_probs[position]


def _draft_prob(draft: Draft, position: int) -> float:
    """Return the probability the token at `position` was sampled with."""
    ids, probs = _draft_row(draft, position)
    return sum(prob for top, prob in zip(ids, probs, strict=True) if top == draft.token_ids[position])


def _residual(law: Tensor, draft_probs: Sequence[tuple[int, int, float]]) -> Tensor:
    """Return [law - draft]+ [requests, vocab], not normalised; where rounding leaves nothing, the target's row.

    Args:
        draft_probs: the entries to subtract, as (row, token, probability).
    """
    rows, tokens, probs = zip(*draft_probs, strict=True)
    values = torch.tensor(probs, dtype=law.dtype, device=law.device)
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=law.device)
    residual = law.index_put((index[0], index[1]), -values, accumulate=True).clamp_(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, law)
