"""Block verification by exact enumeration: every draft, every way the coins can fall, in float64."""

import functools
import itertools

import pytest
import torch

from engine.protocols import Draft, chain
from engine.verification import rejection
from engine.verification.block import accept
from tests.engine.laws import VOCAB, K, joint, random_tables, total_variation
from tests.engine.verification import enumeration, test_rejection
from tests.engine.verification.enumeration import emitted_law, expected_accepted, own_rows, row_of, sampled_chains


def thresholds(target, draft):
    """Per token, the coin below which it is accepted: the paper's h_i, written down again."""
    laws = [law.tolist() for law in own_rows(target, draft)]
    found, reach = [], 1.0
    for i, token in enumerate(draft.token_ids):
        reach = min(1.0, reach * laws[i][token] / row_of(draft, i)[token])
        if i + 1 == len(draft.token_ids):
            found.append(reach)
        else:
            rest = sum(max(0.0, reach * p - q) for p, q in zip(laws[i + 1], row_of(draft, i + 1), strict=True))
            found.append(rest / (rest + 1 - reach) if rest + 1 - reach else 0.0)
    return found


with_thresholds = functools.partial(enumeration.with_thresholds, thresholds)
by_token = functools.partial(enumeration.with_thresholds, test_rejection.thresholds)


@pytest.mark.parametrize("zeros", [False, True], ids=["all tokens possible", "some tokens impossible"])
@pytest.mark.parametrize("top", [3, 2, 1])
def test_the_joint_law_is_the_targets_to_the_last_bit(top, zeros):
    target, draft_law = random_tables(1, zeros=zeros), random_tables(2)
    law = emitted_law(accept, target, with_thresholds(target, sampled_chains(draft_law, top=top)))
    assert total_variation(law, joint(target)) < 1e-12


@pytest.mark.parametrize("zeros", [False, True])
def test_any_fixed_draft_without_rows_leaves_the_law_alone(zeros):
    target = random_tables(4, zeros=zeros)
    for tokens in itertools.product(range(VOCAB), repeat=K):
        law = emitted_law(accept, target, with_thresholds(target, [(chain(list(tokens)), 1.0)]))
        assert total_variation(law, joint(target)) < 1e-12


def test_it_never_accepts_fewer_tokens_than_the_rejection_rule_and_mostly_more():
    gains = []
    for seed in range(6):
        target, draft_law = random_tables(seed), random_tables(100 + seed)
        proposals = list(sampled_chains(draft_law))
        block = expected_accepted(accept, target, with_thresholds(target, proposals))
        token = expected_accepted(rejection.accept, target, by_token(target, proposals))
        gains.append(block / token - 1)
    assert min(gains) > -1e-12
    assert sum(gain > 0.005 for gain in gains) > 3


def test_a_drafter_that_is_the_target_loses_nothing():
    target = random_tables(3)
    drafts = [draft for draft, _ in sampled_chains(target)]
    rows = torch.stack([row for draft in drafts for row in own_rows(target, draft)])
    accepted, _ = accept(rows, torch.full((len(drafts) * K,), 1 - 2.0**-24, dtype=torch.float64), drafts)
    assert accepted == [list(range(K))] * len(drafts)


def test_a_token_may_be_kept_for_the_sake_of_a_later_one():
    """The rejection rule ends at the first token; here the second one makes up for it."""
    rows = torch.tensor([[0.2, 0.8], [0.9, 0.1], [0.5, 0.5]], dtype=torch.float64)
    draft = Draft([0, 0], [-1, 0], [[0, 1], [0, 1]], [[0.4, 0.6], [0.5, 0.5]])
    coins = torch.tensor([0.6, 0.6], dtype=torch.float64)
    assert rejection.accept(rows, coins, [draft])[0] == [[]]
    assert accept(rows, coins, [draft])[0] == [[0, 1]]


def test_a_tree_counts_as_the_chain_it_begins_with():
    """Its other nodes are not looked at, and the rows of the next request stay in place."""
    target = random_tables(5)
    tree, after = Draft([0, 1], [-1, -1]), chain([2])
    rows = torch.stack([target[()], target[(0,)], target[(1,)], target[()], target[(2,)]])
    accepted, law = accept(rows, torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64), [tree, after])
    assert accepted == [[0], [0]]
    assert torch.allclose(law / law.sum(-1, keepdim=True), rows[[1, 4]])


def test_a_token_the_target_never_draws_is_not_kept():
    rows = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    accepted, law = accept(rows, torch.zeros(2), [chain([0, 0])])
    assert accepted == [[]]
    assert (law / law.sum()).tolist() == [[0.0, 1.0, 0.0]]
    impossible = Draft([0], [-1], [[0, 1]], [[0.0, 1.0]])
    assert accept(rows[:2], torch.zeros(1), [impossible])[0] == [[]]


def test_an_empty_residual_falls_back_to_the_target():
    row = [0.25, 0.75, 0.0]
    draft = Draft([0], [-1], [[0, 1, 2]], [[0.2500001, 0.7500001, 0.0]])
    accepted, law = accept(torch.tensor([row, row]), torch.tensor([1 - 2.0**-25]), [draft])
    assert (accepted, law.tolist()) == ([[]], [row])
