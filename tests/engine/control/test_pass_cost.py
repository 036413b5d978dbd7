"""The cost of a pass over n tokens, on machines with noise that become slower."""

import math
import random
from itertools import pairwise

import pytest

from engine.control.pass_cost import PassCost, rising


def true_s(num_tokens):
    return 0.01 + 1e-5 * num_tokens + 5e-5 * max(0, num_tokens - 100)


def learn(costs, sizes, *, slow=1.0, noise=0.1, seed=1):
    chance = random.Random(seed)
    for size in sizes:
        costs.observe(size, slow * true_s(size) * math.exp(chance.gauss(0, noise)))


SIZES = (8, 40, 72, 8, 136, 40, 264, 72)


@pytest.mark.parametrize("size", [8, 40, 72, 136, 264])
def test_every_size_is_learned(size):
    costs = PassCost()
    learn(costs, SIZES * 30)
    assert costs.seconds(size)[0] == pytest.approx(true_s(size), rel=0.12)


def test_costs_never_fall_with_the_number_of_tokens():
    costs = PassCost()
    learn(costs, SIZES * 2, noise=0.5)
    seconds = costs.seconds(1, 400)
    assert all(here <= further for here, further in pairwise(seconds))


def test_a_machine_that_becomes_slower_does_not_make_drafts_dear():
    """At one size for long, half as slow again: what other sizes cost, over this one, stays."""
    costs = PassCost()
    learn(costs, SIZES * 30)
    before = costs.relative(8) / costs.relative(136)
    learn(costs, [136] * 200, slow=1.5)
    assert costs.seconds(136)[0] == pytest.approx(1.5 * true_s(136), rel=0.12)
    assert costs.relative(8) / costs.relative(136) == pytest.approx(before, rel=0.1)


def test_a_size_that_was_never_seen_takes_the_surprise_not_the_machine():
    costs = PassCost()
    learn(costs, [8] * 50, noise=0.02)
    learn(costs, [264] * 3, noise=0.02)
    assert costs.seconds(8)[0] == pytest.approx(true_s(8), rel=0.1)
    assert costs.seconds(264)[0] == pytest.approx(true_s(264), rel=0.15)


def test_one_stall_changes_little():
    costs = PassCost()
    learn(costs, SIZES * 30, noise=0.02)
    before = costs.seconds(40)[0]
    costs.observe(40, 100 * true_s(40))
    assert costs.seconds(40)[0] < 1.25 * before


def test_before_anything_is_known_all_sizes_cost_the_same():
    assert PassCost().seconds(3, 2) == [1.0, 1.0, 1.0]


def test_neighbours_that_disagree_share_their_weighted_mean():
    assert rising([1, 4, 2, 5, 0], [1, 1, 3, 1, 1]) == pytest.approx([1, 2.5, 2.5, 2.5, 2.5])
    assert rising([1, 4, 2, 5], [1, 1, 3, 1]) == pytest.approx([1, 2.5, 2.5, 5])
