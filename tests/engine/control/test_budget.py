"""Which draft tokens are taken, and how drafts are cut to them."""

import pytest

from engine.control.budget import Budget, best_budget, cut_drafts, lengths_within
from engine.protocols import Draft, chain


def test_tokens_are_taken_while_one_more_raises_goodput():
    """The second of three tokens costs more than it brings, the third is not looked at alone."""
    budget = best_budget(1.0, [0.2, 0.9, 0.3], [1.0, 1.1, 1.4, 1.5])
    assert budget[:3] == (pytest.approx(1.9 / 1.1), pytest.approx(1.9), 1)
    assert budget.least == 0.9


def test_a_step_of_the_cost_is_crossed_if_enough_tokens_pay_for_it():
    assert best_budget(1.0, [0.6] * 4, [1.0, 2.0, 2.0, 2.0, 1.9]).num_slots == 4
    assert best_budget(1.0, [0.2] * 4, [1.0, 2.0, 2.0, 2.0, 2.0]).num_slots == 0


def test_lengths_take_the_likeliest_tokens_of_all_rows_and_no_more_of_equal_ones_than_pay():
    rows = [[0.9, 0.8, 0.2], [0.5, 0.1], [0.9, 0.5, 0.5], []]
    assert lengths_within(Budget(1, 1, 4, 0.5), rows) == [2, 1, 1, 0]
    assert lengths_within(Budget(1, 1, 5, 0.5), rows) == [2, 1, 2, 0]
    assert lengths_within(Budget(1, 1, 0, 2.0), rows) == [0, 0, 0, 0]


def test_a_chain_keeps_its_first_tokens_with_their_confidences():
    draft = Draft([5, 6, 7], [-1, 0, 1], confidences=[0.9, 0.5, 0.9], is_predicted=True)
    other = chain([8])
    cut = cut_drafts(Budget(1, 1, 2, 0.8), [draft, other], [[0.9, 0.45, 0.4], [0.8]])
    assert cut == [Draft([5], [-1], confidences=[0.9], is_predicted=True), other]


def test_a_tree_keeps_nodes_with_their_parents():
    """Two children of the tip; the first one's child goes, the second one's stays."""
    draft = Draft([5, 6, 7, 8], [-1, -1, 0, 1])
    (cut,) = cut_drafts(Budget(1, 1, 3, 0.4), [draft], [[0.5, 0.4, 0.1, 0.4]])
    assert cut == Draft([5, 6, 8], [-1, -1, 1])


def test_of_equal_nodes_parents_come_first():
    draft = Draft([5, 6], [-1, 0])
    assert cut_drafts(Budget(1, 1, 1, 0.4), [draft], [[0.4, 0.4]]) == [Draft([5], [-1])]
