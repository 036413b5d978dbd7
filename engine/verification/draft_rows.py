"""Shared by the rules with coins and draft rows: decisions, the walk down a tree, rows, coins and residuals."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.execution.forward_row import depths
from engine.protocols import Draft
from engine.sampling import noise
from engine.sampling.logits import Run, draw, probabilities, shape

Accept = Callable[[Tensor, Tensor, Sequence[Draft]], tuple[list[list[int]], Tensor]]
"""A rule, as a pure function of target probabilities [n, vocab] (as `rule.Decide`'s logits), a coin [nodes] per draft
token, and the drafts. Returns accepted paths, root first, and the next tokens' weights, [requests, vocab], which need
not sum to 1."""


Entry = tuple[int, int, float]
"""An index of a row of weights, a token id, and the draft's probability to subtract there."""


class NodeFacts(NamedTuple):
    """Inputs of a node's decision: the target's probabilities of tokens after the node's parent, and a coin."""

    target_probs: dict[int, float]
    coin: float


Choose = Callable[[Draft, Sequence[int], Sequence[NodeFacts]], tuple[list[int], Mapping[int, float]]]
"""Decides between siblings. Takes the draft, the siblings, and the facts of all nodes. Returns the accepted child, with
the siblings whose children continue it, too; or no nodes, and the probabilities to subtract from the target's row, by
token."""


def decide_by(
    accept: Accept, logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], _drawn: list[int] | None
) -> list[tuple[list[int], list[int]]]:
    """Toss coins, accept a path of each draft, and draw the token that follows; see `rule.Decide`."""
    shaped = shape(logits, runs)
    paths, law = accept(probabilities(shaped, runs), coins(runs, drafts, shaped.device), drafts)
    ends = [Run(run.request, [len(path)]) for run, path in zip(runs, paths, strict=True)]
    final = draw(law.log(), ends, noise.RESIDUAL_STREAM).tolist()
    return [
        ([*(draft.token_ids[node] for node in path), token], path)
        for draft, path, token in zip(drafts, paths, final, strict=True)
    ]


def coins(runs: Sequence[Run], drafts: Sequence[Draft], device: torch.device) -> Tensor:
    """Return an independent uniform number per draft token, [nodes], draft by draft."""
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


def walk(
    target_probs: Tensor,
    coins: Tensor,
    drafts: Sequence[Draft],
    choose: Choose,
    tokens_of: Callable[[Draft, int], Sequence[int]],
) -> tuple[list[list[int]], Tensor]:
    """Descend each draft from its tip until `choose` accepts no child; see `Accept`, and `read` for `tokens_of`."""
    paths: list[list[int]] = []
    ends: list[int] = []
    rejected: list[Entry] = []
    facts = read(target_probs, coins, drafts, tokens_of)
    for request, (draft, start, nodes) in enumerate(zip(drafts, first_rows(drafts), facts, strict=True)):
        tips = [-1]
        while True:
            children = [node for node, parent in enumerate(draft.parents) if parent in tips]
            accepted, subtracted = choose(draft, children, nodes)
            if not accepted:
                break
            tips = accepted
        rejected += [(request, token, prob) for token, prob in subtracted.items()]
        ends.append(start + 1 + tips[0])
        path, node = [], tips[0]
        while node >= 0:
            path.append(node)
            node = draft.parents[node]
        paths.append(path[::-1])
    law = target_probs[torch.tensor(ends, dtype=torch.int64, device=target_probs.device)]
    return paths, or_else(residual(law, rejected), law)


def first_rows(drafts: Sequence[Draft]) -> list[int]:
    """Return the row of each draft's tip; the rows of its tokens follow."""
    return list(itertools.accumulate((1 + len(draft.token_ids) for draft in drafts), initial=0))[:-1]


def read(
    target_probs: Tensor, coins: Tensor, drafts: Sequence[Draft], tokens_of: Callable[[Draft, int], Sequence[int]]
) -> list[list[NodeFacts]]:
    """Return the facts of each draft's nodes, with probabilities of `tokens_of(draft, node)`; waits for the device."""
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


def draft_row(draft: Draft, node: int) -> tuple[list[int], list[float]]:
    """Return a draft token's ids and probabilities; one-hot if the draft has no rows."""
    if draft.top_ids is None or draft.top_probs is None:
        return [draft.token_ids[node]], [1.0]
    return draft.top_ids[node], draft.top_probs[node]


def draft_prob(draft: Draft, node: int) -> float:
    """Return the probability that a draft token was sampled with."""
    ids, probs = draft_row(draft, node)
    return sum(prob for top, prob in zip(ids, probs, strict=True) if top == draft.token_ids[node])


def residual(weights: Tensor, draft_probs: Sequence[Entry]) -> Tensor:
    """Return [weights - draft]+ [rows, vocab], not normalised. weights: [rows, vocab]."""
    if not draft_probs:
        return weights
    rows, tokens, probs = zip(*draft_probs, strict=True)
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=weights.device)
    values = torch.tensor(probs, dtype=weights.dtype, device=weights.device)
    return weights.index_put((index[0], index[1]), -values, accumulate=True).clamp_(min=0)


def or_else(weights: Tensor, target_probs: Tensor) -> Tensor:
    """Return the weights, or the target's row where rounding left no weight; all [rows, vocab]."""
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, target_probs)
