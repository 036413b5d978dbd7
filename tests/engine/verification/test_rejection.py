"""The rejection rule by exact enumeration: every draft, every way the coins can fall, in float64.

The coins of a position are cut where the rule's decision may change and at a few more places; the rule's own `accept`
says what each piece leads to, its length says how likely it is.
"""

import itertools

import pytest
import torch

from engine.protocols import Draft, chain
from engine.verification.rejection import accept
from tests.engine.laws import VOCAB, K, completed, joint, random_tables, total_variation

CUTS = (0.0, 0.07, 0.31, 0.5, 0.83, 1.0)


def coin_pieces(target_prob, draft_prob):
    """(a coin inside the piece, the piece's length): together all of [0, 1)."""
    threshold = min(1.0, target_prob / draft_prob) if draft_prob else 1.0
    edges = sorted({*CUTS, threshold})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)]


def emitted_law(target, proposals):
    """The joint law of K + 1 tokens: a round, then the target alone.

    Args:
        proposals: (draft, its probability, per position the probability its token was sampled with).
    """
    rows, coins, drafts, weights = [], [], [], []
    for draft, prob, sampled in proposals:
        tokens = tuple(draft.token_ids)
        own_rows = [target[tokens[:i]] for i in range(K + 1)]
        pieces = [coin_pieces(float(row[t]), q) for row, t, q in zip(own_rows, tokens, sampled, strict=False)]
        for fall in itertools.product(*pieces):
            rows += own_rows
            coins += [*(coin for coin, _ in fall), 0.5]
            drafts.append(draft)
            weights.append(prob * float(torch.tensor([length for _, length in fall], dtype=torch.float64).prod()))
    accepted, after = accept(torch.stack(rows), torch.tensor(coins, dtype=torch.float64), drafts)
    after = after / after.sum(-1, keepdim=True)
    heads = {}
    for draft, weight, count, law in zip(drafts, weights, accepted, after.tolist(), strict=True):
        for token, prob in enumerate(law):
            head = (*draft.token_ids[:count], token)
            heads[head] = heads.get(head, 0.0) + weight * prob
    return completed(heads.items(), target)


def sampled_drafts(draft_law, *, top=VOCAB):
    """Every chain the drafter can sample from its `top` likeliest tokens, with its sparse rows."""
    for tokens in itertools.product(range(VOCAB), repeat=K):
        ids, probs, sampled = [], [], []
        for i, token in enumerate(tokens):
            best, order = draft_law[tokens[:i]].topk(top)
            row = (best / best.sum()).tolist()
            ids.append(order.tolist())
            probs.append(row)
            sampled.append(dict(zip(order.tolist(), row, strict=True)).get(token, 0.0))
        prob = float(torch.tensor(sampled, dtype=torch.float64).prod())
        if prob > 0:
            yield Draft(list(tokens), list(range(-1, K - 1)), ids, probs), prob, sampled


@pytest.mark.parametrize("zeros", [False, True], ids=["all tokens possible", "some tokens impossible"])
@pytest.mark.parametrize("top", [3, 2, 1])
def test_the_joint_law_is_the_targets_to_the_last_bit(top, zeros):
    target, draft_law = random_tables(1, zeros=zeros), random_tables(2)
    law = emitted_law(target, list(sampled_drafts(draft_law, top=top)))
    assert total_variation(law, joint(target)) < 1e-12


def test_a_drafter_that_is_the_target_loses_nothing():
    target = random_tables(3)
    proposals = list(sampled_drafts(target))
    rows = torch.stack([target[tuple(d.token_ids[:i])] for d, _, _ in proposals for i in range(K + 1)])
    accepted, _ = accept(
        rows, torch.full((len(rows),), 1 - 2.0**-24, dtype=torch.float64), [d for d, _, _ in proposals]
    )
    assert accepted == [K] * len(proposals)
    assert total_variation(emitted_law(target, proposals), joint(target)) < 1e-12


@pytest.mark.parametrize("zeros", [False, True])
def test_any_fixed_draft_without_rows_leaves_the_law_alone(zeros):
    target = random_tables(4, zeros=zeros)
    for tokens in itertools.product(range(VOCAB), repeat=K):
        law = emitted_law(target, [(chain(list(tokens)), 1.0, [1.0] * K)])
        assert total_variation(law, joint(target)) < 1e-12


def test_a_tree_counts_as_the_chain_it_begins_with():
    """Its other nodes are not looked at, and the rows of the next request stay in place."""
    target = random_tables(5)
    rows = torch.stack([target[()], target[(0,)], target[(1,)], target[()], target[(2,)]])
    tree, after = Draft([0, 1], [-1, -1]), chain([2])
    coins = torch.tensor([0.0, 0.0, 0.9, 0.0, 0.9], dtype=torch.float64)
    accepted, law = accept(rows, coins, [tree, after])
    assert accepted == [1, 1]
    assert torch.equal(law, rows[[1, 4]])


def test_a_token_the_target_never_draws_is_rejected_by_a_coin_of_zero():
    rows = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    accepted, law = accept(rows, torch.zeros(2), [chain([0])])
    assert accepted == [0]
    assert law.tolist() == [[0.0, 1.0, 0.0]]


def test_nothing_is_accepted_after_a_rejection():
    rows = torch.full((4, VOCAB), 1 / VOCAB)
    accepted, _ = accept(rows, torch.tensor([0.0, 0.99, 0.0, 0.0]), [chain([0, 1, 2])])
    assert accepted == [1]


def test_an_empty_residual_falls_back_to_the_target():
    """Only rounding can reject a token where draft and target agree; then there is nothing left to subtract from."""
    row = [0.25, 0.75, 0.0]
    draft = Draft([0], [-1], [[0, 1, 2]], [[0.2500001, 0.7500001, 0.0]])
    accepted, law = accept(torch.tensor([row, row]), torch.tensor([1 - 2.0**-24, 0.5]), [draft])
    assert (accepted, law.tolist()) == ([0], [row])
