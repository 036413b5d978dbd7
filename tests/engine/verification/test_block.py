"""Rules for chains by exact enumeration: every draft, every way the coins can fall, in float64."""

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
of_both_rules = pytest.mark.parametrize(
    ("accept", "with_thresholds"), [(accept, with_thresholds), (rejection.accept, by_token)], ids=["block", "rejection"]
)


@of_both_rules
@pytest.mark.parametrize("zeros", [False, True], ids=["all tokens possible", "some tokens impossible"])
@pytest.mark.parametrize("top", [3, 2, 1])
def test_the_joint_law_is_the_targets_to_the_last_bit(top, zeros, accept, with_thresholds):
    target, draft_law = random_tables(1, zeros=zeros), random_tables(2)
    law = emitted_law(accept, target, with_thresholds(target, sampled_chains(draft_law, top=top)))
    assert total_variation(law, joint(target)) < 1e-12


@of_both_rules
def test_any_fixed_draft_without_rows_leaves_the_law_alone(accept, with_thresholds):
    target = random_tables(4, zeros=True)
    for tokens in itertools.product(range(VOCAB), repeat=K):
        law = emitted_law(accept, target, with_thresholds(target, [(chain(list(tokens)), 1.0)]))
        assert total_variation(law, joint(target)) < 1e-12


def test_it_never_accepts_fewer_tokens_than_the_rejection_rule_and_mostly_more():
    gains = []
    for seed in range(4):
        target, draft_law = random_tables(seed), random_tables(100 + seed)
        proposals = list(sampled_chains(draft_law))
        block = expected_accepted(accept, target, with_thresholds(target, proposals))
        token = expected_accepted(rejection.accept, target, by_token(target, proposals))
        gains.append(block / token - 1)
    assert min(gains) > -1e-12
    assert sum(gain > 0.005 for gain in gains) > 2


@of_both_rules
def test_a_token_the_target_never_draws_is_not_kept(accept, with_thresholds):
    rows = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    accepted, law = accept(rows, torch.zeros(2), [chain([0, 0])])
    assert accepted == [[]]
    assert (law / law.sum()).tolist() == [[0.0, 1.0, 0.0]]


@of_both_rules
def test_an_empty_residual_falls_back_to_the_target(accept, with_thresholds):
    """Only rounding can reject a token where draft and target agree; then there is nothing left to subtract from."""
    row = [0.25, 0.75, 0.0]
    draft = Draft([0], [-1], [[0, 1, 2]], [[0.2500001, 0.7500001, 0.0]])
    accepted, law = accept(torch.tensor([row, row]), torch.tensor([1 - 2.0**-25]), [draft])
    assert (accepted, law.tolist()) == ([[]], [row])
