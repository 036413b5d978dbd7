"""What rules that need draft rows share: how they decide, and what they read out of drafts: rows, coins, residuals."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.execution.batch import depths
from engine.protocols import Draft
from engine.sampling import noise
from engine.sampling.logits import Run, gumbel_rows, probabilities, shape

Accept = Callable[[Tensor, Tensor, Sequence[Draft]], tuple[list[list[int]], Tensor]]
"""A rule as a function of target probabilities [n, vocab], coins [nodes] and drafts: the accepted path of each draft,
and [requests, vocab] weights of the token after it."""


class Entry(NamedTuple):
    """One probability of a draft row, and the row of weights that it is subtracted from."""

    row: int
    token_id: int
    prob: float


class NodeFacts(NamedTuple):
    """What a node is decided by: the target's probabilities of some tokens after the node's parent, and a coin."""

    target_probs: dict[int, float]
    coin: float


def decide_by(
    accept: Accept, logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft]
) -> list[tuple[list[int], list[int]]]:
    """Toss coins, accept a path of each draft by a rule, and draw the token that follows; see `rule.Rule.decide`."""
    shaped = shape(logits, runs)
    paths, law = accept(probabilities(shaped, runs), coins(runs, drafts, shaped.device), drafts)
    ends = [Run(run.request, [len(path)]) for run, path in zip(runs, paths, strict=True)]
    final = (law.log() + gumbel_rows(ends, law, noise.RESIDUAL_STREAM)).argmax(-1).tolist()
    return [
        ([*(draft.token_ids[node] for node in path), token], path)
        for draft, path, token in zip(drafts, paths, final, strict=True)
    ]


def coins(runs: Sequence[Run], drafts: Sequence[Draft], device: torch.device) -> Tensor:
    """Return one uniform number per draft token, [nodes], the drafts' in order; all of them are independent."""
    seeds, positions = [], []
    for run, draft in zip(runs, drafts, strict=True):
        tip, seed = len(run.request.token_ids), run.params.seed or 0
        seen: Counter[int] = Counter()
        for depth in depths(draft.parents):
            seeds.append(noise.round_seed(seed, tip, seen[depth]))
            positions.append(tip + depth - 1)
            seen[depth] += 1
    keys = noise.keys(seeds, positions, noise.ACCEPT_STREAM, device)
    return noise.uniform(keys, torch.zeros(1, dtype=torch.int32, device=device)).squeeze(-1)


def first_rows(drafts: Sequence[Draft]) -> list[int]:
    """Return the row of each draft's tip; the rows of its tokens follow."""
    return list(itertools.accumulate((1 + len(draft.token_ids) for draft in drafts), initial=0))[:-1]


def read(
    target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft], tokens_of: Callable[[Draft, int], Sequence[int]]
) -> list[list[NodeFacts]]:
    """Return, per draft and node, what the rule decides the node by; the host waits for the device once.

    Args:
        target_probs: [n, vocab] per request the tip's row, then one row per draft token.
        coins: [nodes] a uniform number per draft token.
        tokens_of: returns the tokens of which a node's decision needs the target's probabilities.
    """
    tokens = [[tokens_of(draft, node) for node in range(len(draft.token_ids))] for draft in drafts]
    places = [
        (start + 1 + parent, token)
        for start, draft, draft_tokens in zip(first_rows(drafts), drafts, tokens, strict=True)
        for parent, node_tokens in zip(draft.parents, draft_tokens, strict=True)
        for token in node_tokens
    ]
    index = torch.tensor(places, dtype=torch.int64, device=target_probs.device).view(-1, 2)
    probs = target_probs[index[:, 0], index[:, 1]]
    numbers = iter(torch.cat([probs, coins.to(probs.dtype)]).tolist())
    known = [
        [dict(zip(node_tokens, itertools.islice(numbers, len(node_tokens)), strict=True)) for node_tokens in row]
        for row in tokens
    ]
    return [[NodeFacts(node, next(numbers)) for node in row] for row in known]


def chain_length(draft: Draft) -> int:
    """Return the length of the chain that a draft begins with."""
    return next((i for i, parent in enumerate(draft.parents) if parent != i - 1), len(draft.parents))


def draft_row(draft: Draft, node: int) -> tuple[list[int], list[float]]:
    """Return the ids and probabilities that a draft token was sampled from; without rows, it was certain."""
    if draft.top_ids is None or draft.top_probs is None:
        return [draft.token_ids[node]], [1.0]
    return draft.top_ids[node], draft.top_probs[node]


def draft_prob(draft: Draft, node: int) -> float:
    """Return the probability that a draft token was sampled with."""
    ids, probs = draft_row(draft, node)
    return sum(prob for top, prob in zip(ids, probs, strict=True) if top == draft.token_ids[node])


def entries(draft: Draft, node: int, row: int) -> list[Entry]:
    """Return what is subtracted from row `row` where the token of a node is rejected."""
    return [Entry(row, token, prob) for token, prob in zip(*draft_row(draft, node), strict=True)]


def residual(weights: Tensor, draft_probs: Sequence[Entry]) -> Tensor:
    """Return [weights - draft]+ [rows, vocab], not normalised. weights: [rows, vocab]."""
    if not draft_probs:
        return weights
    rows, tokens, probs = zip(*draft_probs, strict=True)
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=weights.device)
    values = torch.tensor(probs, dtype=weights.dtype, device=weights.device)
    return weights.index_put((index[0], index[1]), -values, accumulate=True).clamp_(min=0)


def or_else(weights: Tensor, target_probs: Tensor) -> Tensor:
    """Return the weights, and where rounding left nothing of a row, the target's row; all [rows, vocab]."""
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, target_probs)
