"""K-sequential selection by exact enumeration: every set of drafts, every way the coins can fall, in float64."""

import functools
import itertools

import pytest
import torch

from engine.protocols import Draft
from engine.verification.k_sequential import accept, division
from tests.engine.laws import VOCAB, joint, random_tables, total_variation
from tests.engine.verification import enumeration
from tests.engine.verification.enumeration import context_of, emitted_law, row_of


def smallest_division(draft_law, target_law, count):
    """The smallest factor that leaves nothing negative, found by trying, to about 1e-7."""

    def is_valid(factor):
        taken = [min(q, p / factor) for q, p in zip(draft_law, target_law, strict=True)]
        some = 1 - (1 - sum(taken)) ** count
        return sum(taken) == 0 or some <= factor * sum(taken)

    low, high = 1.0, float(count)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_valid(middle) else (middle, high)
    return high


def thresholds(target, draft):
    """Per node, the coin below which it is taken if it is tried."""
    found = []
    for node, parent in enumerate(draft.parents):
        context = context_of(draft, parent)
        count = sum(context_of(draft, other) == context for other in draft.parents)
        law, row, token = target[context].tolist(), row_of(draft, node), draft.token_ids[node]
        factor = division([*row], law, count)
        found.append(law[token] / (factor * row[token]))
    return found


def sampled_drafts(draft_law, shape):
    """Every set of independent chains: the tree, its probability. `shape` is the trees' parents."""
    for tokens in itertools.product(range(VOCAB), repeat=len(shape)):
        draft, prob, rows = Draft(list(tokens), list(shape)), 1.0, []
        for node, parent in enumerate(shape):
            row = draft_law[context_of(draft, parent)].tolist()
            rows.append(row)
            prob *= row[tokens[node]]
        if prob > 0:
            yield Draft(list(tokens), list(shape), [list(range(VOCAB))] * len(shape), rows), prob


with_thresholds = functools.partial(enumeration.with_thresholds, thresholds)


TWO_PAIRS, THREE, TWO_OF_THREE = [-1, -1, 0, 1], [-1, -1, -1], [-1, -1, -1, 0, 1]


@pytest.mark.parametrize("zeros", [False, True], ids=["all tokens possible", "some tokens impossible"])
@pytest.mark.parametrize("shape", [[-1, 0], TWO_PAIRS, THREE, TWO_OF_THREE], ids=["one", "2 x 2", "3 x 1", "uneven"])
def test_the_joint_law_is_the_targets_to_the_last_bit(shape, zeros):
    target, draft_law = random_tables(1, zeros=zeros), random_tables(2)
    proposals = with_thresholds(target, sampled_drafts(draft_law, shape))
    assert total_variation(emitted_law(accept, target, proposals, cuts=(0.0, 1.0)), joint(target)) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_division_factor_is_the_smallest_that_leaves_nothing_negative(count):
    for seed in range(10):
        target, draft_law = random_tables(seed)[()].tolist(), random_tables(100 + seed)[()].tolist()
        assert division(draft_law, target, count) == pytest.approx(smallest_division(draft_law, target, count))
    assert division([0.5, 0.5], [0.0, 0.0], count) >= 1, "the drafts hold nothing that the target may draw"


def test_drafts_that_begin_alike_go_on_together():
    """The first draft's second token is impossible; the second draft's is taken, and the path is the second's."""
    target = torch.tensor([[0.0, 1.0, 0.0]] * 5, dtype=torch.float64)
    draft = Draft([1, 1, 0, 1], [-1, -1, 0, 1], [[0, 1]] * 4, [[0.5, 0.5]] * 4)
    paths, law = accept(target, torch.full((4,), 0.1, dtype=torch.float64), [draft])
    assert paths == [[1, 3]]
    assert law.tolist() == [[0.0, 1.0, 0.0]]
