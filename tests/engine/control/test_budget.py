"""Which draft tokens are taken."""

import numpy as np
import pytest

from engine.control.budget import best_budget


def best(rows, seconds, depths=None):
    """The budget of rows whose tokens take no time to draft, where no depths are given."""
    chances = np.array(rows)
    depths = np.zeros(chances.shape, int) if depths is None else np.array(depths)
    return best_budget(1.0, chances, depths, np.array(seconds))


def test_tokens_are_taken_while_more_of_them_raise_goodput():
    """The second of three tokens costs more than it brings, the third is not looked at alone."""
    budget = best([[0.2], [0.9], [0.3]], [[1.0, 1.1, 1.4, 1.5]])
    assert (budget.rate, budget.num_tokens, budget.lengths.tolist()) == (1.9 / 1.1, 1.9, [0, 1, 0])


@pytest.mark.parametrize(
    ("rows", "seconds", "lengths"),
    [
        ([[0.6] * 4], [1.0, 2.0, 2.0, 2.0, 1.9], [4]),  # a step of the cost is crossed if enough tokens pay for it
        ([[0.2] * 4], [1.0, 2.0, 2.0, 2.0, 2.0], [0]),
        ([[0.5, 0.01], [0.9, 0.5], [0.5, 0.0]], [1.0, 1.0, 1.0, 1.3, 1.5, 1.5, 1.5], [1, 1, 0]),  # the first of equals
        ([[0.03], [0.5], [0.039]], [1.0] * 4, [0, 1, 0]),  # unlikely tokens are never taken
        ([[], []], [1.0], [0, 0]),
    ],
)
def test_the_most_tokens_per_second_are_taken(rows, seconds, lengths):
    assert best(rows, [seconds]).lengths.tolist() == lengths


def test_deep_tokens_are_taken_if_they_pay_for_their_drafting():
    rows, depths = [[0.9, 0.8], [0.9, 0.8]], [[1, 2], [0, 0]]
    assert best(rows, [[1.0] * 5, [1.1] * 5, [1.2] * 5], depths).lengths.tolist() == [2, 2]
    assert best(rows, [[1.0] * 5, [1.1] * 5, [2.0] * 5], depths).lengths.tolist() == [1, 2]
    assert best(rows, [[1.0] * 5, [2.0] * 5, [3.0] * 5], depths).lengths.tolist() == [0, 2], (
        "copies are drafted at once"
    )
