"""The joint law of a round under a rule that tosses coins: every draft, every way the coins can fall, in float64."""

import itertools
import math

import torch

from engine.protocols import Draft
from tests.engine.laws import VOCAB, K, completed

CUTS = (0.0, 0.07, 0.31, 0.5, 0.83, 1.0)


def context_of(draft, node):
    """The draft tokens from the tip to a node."""
    tokens = []
    while node >= 0:
        tokens.append(draft.token_ids[node])
        node = draft.parents[node]
    return tuple(reversed(tokens))


def own_rows(target, draft):
    """The target's laws at the tip and after each node."""
    return [target[context_of(draft, node)] for node in range(-1, len(draft.token_ids))]


def with_thresholds(thresholds, target, proposals):
    """Proposals (draft, its probability) with each node's coin at which the rule's decision changes."""
    return [(draft, prob, thresholds(target, draft)) for draft, prob in proposals]


def pieces(threshold, cuts=CUTS):
    """(a coin inside the piece, the piece's length): together all of [0, 1)."""
    edges = sorted({*cuts, min(1.0, max(0.0, threshold))})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)]


def rounds(accept, target, proposals, cuts=CUTS):
    """Every outcome of a round: (draft, path, the law of the token after it, weight).

    Args:
        proposals: (draft, its probability, per node the coin at which the rule's decision changes).
    """
    rows, coins, drafts, weights = [], [], [], []
    for draft, prob, thresholds in proposals:
        laws = own_rows(target, draft)
        for fall in itertools.product(*(pieces(threshold, cuts) for threshold in thresholds)):
            rows += laws
            coins += [coin for coin, _ in fall]
            drafts.append(draft)
            weights.append(prob * math.prod(length for _, length in fall))
    paths, after = accept(torch.stack(rows), torch.tensor(coins, dtype=torch.float64), drafts)
    after = after / after.sum(-1, keepdim=True)
    return list(zip(drafts, paths, after.tolist(), weights, strict=True))


def emitted_law(accept, target, proposals, cuts=CUTS):
    """The joint law of K + 1 tokens: a round, then the target alone."""
    heads = {}
    for draft, path, law, weight in rounds(accept, target, proposals, cuts):
        tokens = [draft.token_ids[node] for node in path]
        for token, prob in enumerate(law):
            head = (*tokens, token)
            heads[head] = heads.get(head, 0.0) + weight * prob
    return completed(heads.items(), target)


def expected_accepted(accept, target, proposals):
    """The expected number of accepted tokens of a round."""
    return sum(weight * len(path) for _, path, _, weight in rounds(accept, target, proposals))


def sampled_chains(draft_law, *, top=VOCAB):
    """Every chain that the drafter can sample from its `top` likeliest tokens, with its sparse rows and probability."""
    for tokens in itertools.product(range(VOCAB), repeat=K):
        ids, probs, prob = [], [], 1.0
        for i, token in enumerate(tokens):
            best, order = draft_law[tokens[:i]].topk(top)
            row = (best / best.sum()).tolist()
            ids.append(order.tolist())
            probs.append(row)
            prob *= dict(zip(order.tolist(), row, strict=True)).get(token, 0.0)
        if prob > 0:
            yield Draft(list(tokens), list(range(-1, K - 1)), ids, probs), prob


def row_of(draft, node):
    """The law that a node's token was sampled from, [vocab]."""
    if draft.top_ids is None:
        return [float(token == draft.token_ids[node]) for token in range(VOCAB)]
    row = dict(zip(draft.top_ids[node], draft.top_probs[node], strict=True))
    return [row.get(token, 0.0) for token in range(VOCAB)]
