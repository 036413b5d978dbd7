"""The rejection rule by exact enumeration: every draft, every way the coins can fall, in float64."""

import functools
import itertools
import math

import pytest
import torch

from engine.protocols import Draft
from engine.verification.rejection import accept
from tests.engine.laws import VOCAB, joint, random_tables, total_variation
from tests.engine.verification import enumeration
from tests.engine.verification.enumeration import (
    context_of,
    emitted_law,
    expected_accepted,
    row_of,
)


def thresholds(target, draft):
    """Per node, the coin below which it is accepted if it is tried: the rule, written down again."""
    found = []
    for node, parent in enumerate(draft.parents):
        law = target[context_of(draft, parent)].tolist()
        for earlier in (i for i in range(node) if draft.parents[i] == parent):
            law = [max(0.0, p - q) for p, q in zip(law, row_of(draft, earlier), strict=True)]
            law = [p / (sum(law) or 1.0) for p in law]
        token = draft.token_ids[node]
        sampled = row_of(draft, node)[token]
        found.append(law[token] / sampled if sampled else 1.0)
    return found


with_thresholds = functools.partial(enumeration.with_thresholds, thresholds)


def siblings(draft_law, context, count, *, replace):
    """Every way to draw some children after a context: tokens, their rows and their probability."""
    for tokens in itertools.product(range(VOCAB), repeat=count):
        row, rows, prob = draft_law[context].tolist(), [], 1.0
        for token in tokens:
            rows.append(list(row))
            prob *= row[token]
            if not replace:
                row[token] = 0.0
                row = [p / (sum(row) or 1.0) for p in row]
        if prob > 0:
            yield list(tokens), rows, prob


SHAPES = {
    "siblings": [2],
    "all tokens": [3],
    "a pair after the first": [2, 2],
    "a pair after the second": [2, 0, 2],
    "one after each": [2, 1, 1],
    "a chain beside a leaf": [2, 1, 0, 1],
}
"""The number of children of the tip, and then of each node in order."""


def sampled_trees(draft_law, shape, *, replace):
    """Every tree of a shape that can be sampled, and its probability."""
    trees = [(Draft([], [], [], []), 1.0)]
    for node, count in enumerate(shape, start=-1):
        if count:
            trees = [
                (
                    Draft(
                        draft.token_ids + tokens,
                        draft.parents + [node] * count,
                        draft.top_ids + [list(range(VOCAB))] * count,
                        draft.top_probs + rows,
                    ),
                    weight * prob,
                )
                for draft, weight in trees
                for tokens, rows, prob in siblings(draft_law, context_of(draft, node), count, replace=replace)
            ]
    return trees


@pytest.mark.parametrize("replace", [False, True], ids=["without replacement", "independent"])
@pytest.mark.parametrize("zeros", [False, True], ids=["all tokens possible", "some tokens impossible"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_joint_law_of_trees_is_the_targets(name, zeros, replace):
    target, draft_law = random_tables(1, zeros=zeros), random_tables(2)
    trees = sampled_trees(draft_law, SHAPES[name], replace=replace)
    assert math.isclose(sum(prob for _, prob in trees), 1.0)
    law = emitted_law(accept, target, with_thresholds(target, trees), cuts=(0.0, 1.0))
    assert total_variation(law, joint(target)) < 1e-12


def test_a_sibling_is_tried_where_the_first_is_rejected():
    """All tokens of the vocabulary, drawn without replacement: one of them is always accepted."""
    target, draft_law = random_tables(1), random_tables(2)
    accepted = [
        expected_accepted(accept, target, with_thresholds(target, sampled_trees(draft_law, [n], replace=False)))
        for n in (1, 2, 3)
    ]
    assert accepted[0] < accepted[1] < accepted[2] == pytest.approx(1.0)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    "draft",
    [Draft([0, 1], [-1, -1]), Draft([1, 0, 2, 0], [-1, -1, 0, 1])],
)
def test_any_fixed_draft_without_rows_leaves_the_law_alone(draft, zeros):
    target = random_tables(4, zeros=zeros)
    law = emitted_law(accept, target, with_thresholds(target, [(draft, 1.0)]))
    assert total_variation(law, joint(target)) < 1e-12


def test_an_empty_residual_of_siblings_falls_back_to_the_target():
    row = [0.25, 0.75, 0.0]
    draft = Draft([0] * 2, [-1] * 2, [[0, 1, 2]] * 2, [[0.2500001, 0.7500001, 0.0]] * 2)
    paths, law = accept(torch.tensor([row] * 3), torch.tensor([1 - 2.0**-24] * 2), [draft])
    assert (paths, law.tolist()) == ([[]], [row])
