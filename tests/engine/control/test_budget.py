"""Which draft tokens are taken."""

import pytest

from engine.control.budget import best_budget


def test_tokens_are_taken_while_one_more_raises_goodput():
    """The second of three tokens costs more than it brings, the third is not looked at alone."""
    budget = best_budget(1.0, [0.2, 0.9, 0.3], [1.0, 1.1, 1.4, 1.5])
    assert budget == (pytest.approx(1.9 / 1.1), pytest.approx(1.9), [1])


def test_a_step_of_the_cost_is_crossed_if_enough_tokens_pay_for_it():
    assert best_budget(1.0, [0.6] * 4, [1.0, 2.0, 2.0, 2.0, 1.9]).chosen == [0, 1, 2, 3]
    assert best_budget(1.0, [0.2] * 4, [1.0, 2.0, 2.0, 2.0, 2.0]).chosen == []


def test_of_equal_tokens_the_first_are_taken_and_unlikely_ones_never():
    budget = best_budget(1.0, [0.5, 0.9, 0.5, 0.5, 0.01], [1.0, 1.0, 1.0, 1.3, 1.5, 1.5])
    assert budget.chosen == [1, 0]
    assert best_budget(1.0, [0.03, 0.5, 0.039], [1.0] * 4).chosen == [1]
