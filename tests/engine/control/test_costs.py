"""What passes over n tokens take, on machines with noise that become slower, and what rounds take beside them."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from engine.control.costs import PassCost, RoundCost
from engine.control.plan import RoundSeconds

SIZES = (8, 40, 72, 8, 136, 40, 264, 72)
PASS_S = 0.01


def true_s(num_tokens):
    return 0.01 + 1e-5 * num_tokens + 5e-5 * max(0, num_tokens - 100)


def learn(costs, sizes, *, slow=1.0, noise=0.1):
    chance = random.Random(1)
    for size in sizes:
        costs.observe(size, slow * true_s(size) * math.exp(chance.gauss(0, noise)))


def learned(noise=0.1):
    costs = PassCost()
    learn(costs, SIZES * 30, noise=noise)
    return costs


@pytest.mark.parametrize("size", sorted(set(SIZES)))
def test_every_size_is_learned(size):
    assert float(learned().seconds(size)) == pytest.approx(true_s(size), rel=0.12)


def test_costs_never_fall_with_the_number_of_tokens():
    costs = PassCost()
    learn(costs, SIZES * 2, noise=0.5)
    assert all(here <= further for here, further in pairwise(costs.seconds(np.arange(1, 400))))


def test_a_machine_that_becomes_slower_does_not_make_drafts_dear():
    """At one size for long, half as slow again: what other sizes cost, over this one, stays."""
    costs = learned()
    small, large = costs.seconds(np.array([8, 136]))
    learn(costs, [136] * 200, slow=1.5)
    later_small, later_large = costs.seconds(np.array([8, 136]))
    assert later_large == pytest.approx(1.5 * true_s(136), rel=0.12)
    assert later_small / later_large == pytest.approx(small / large, rel=0.15)


def test_a_size_that_was_never_seen_takes_the_surprise_not_the_machine():
    costs = PassCost()
    learn(costs, [8] * 50 + [264] * 3, noise=0.02)
    assert costs.seconds(np.array([8, 264])) == pytest.approx([true_s(8), true_s(264)], rel=0.1)


def test_one_stall_changes_little():
    costs = learned(noise=0.02)
    before = costs.seconds(40)
    costs.observe(40, 100 * true_s(40))
    assert costs.seconds(40) < 1.25 * before


def test_before_anything_is_known_all_sizes_cost_the_same():
    assert PassCost().seconds(np.arange(3)).tolist() == [1.0, 1.0, 1.0]


def play(costs, overlap, num_rows, depth, draft_s, *, count=60):
    for _ in range(count):
        costs.passes.observe(num_rows, PASS_S)
        total_s = (max(draft_s, PASS_S) if overlap == "alternate" else draft_s + PASS_S) + 0.001
        costs.observe(overlap, num_rows, depth, RoundSeconds(total_s, draft_s, PASS_S))


def waits(costs, overlap, num_rows, depths):
    """What rounds take beside their passes and the rest."""
    return [float(costs.seconds(overlap, num_rows, depth, PASS_S)) - PASS_S - 0.001 for depth in depths]


def test_drafts_cost_by_depth_and_none_cost_nothing():
    costs = RoundCost()
    for depth in (2, 4, 8, 1) * 3:
        play(costs, "none", 4, depth, 0.001 * depth, count=10)
    assert waits(costs, "none", 4, (0, 1, 4, 8)) == pytest.approx([0, 0.001, 0.004, 0.008], abs=0.0003)


def test_alternation_takes_the_longer_of_drafts_and_pass():
    costs = RoundCost()
    play(costs, "none", 4, 4, 0.004)
    for _ in range(2):
        assert waits(costs, "alternate", 4, (4, 16)) == pytest.approx([0, 0.006], abs=0.0005)
        play(costs, "alternate", 4, 4, 0.004)


def test_running_ahead_hides_much_for_one_row_and_little_for_many_until_it_is_measured():
    costs = RoundCost()
    play(costs, "none", 1, 4, 0.004)
    play(costs, "none", 64, 4, 0.004)
    assert waits(costs, "ahead", 1, [4])[0] < 0.3 * 0.004
    assert 0.7 * 0.004 < waits(costs, "ahead", 64, [4])[0] < 0.0042
    play(costs, "ahead", 64, 4, 0.0005)
    assert waits(costs, "ahead", 64, [4]) == pytest.approx([0.0005], rel=0.15)
    assert waits(costs, "none", 64, [4]) == pytest.approx([0.004], rel=0.1)


def test_a_new_batch_size_begins_with_what_the_nearest_took():
    costs = RoundCost()
    play(costs, "none", 4, 4, 0.004)
    play(costs, "none", 64, 4, 0.012)
    assert waits(costs, "none", 8, [4]) == pytest.approx([0.004], rel=0.05)
    assert waits(costs, "none", 33, [4]) == pytest.approx([0.012], rel=0.05)
