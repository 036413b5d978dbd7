"""What a round takes: waits for drafts and the rest, by overlap."""

import pytest

from engine.control.round_cost import RoundCost

PASS_S = 0.01


def learn(costs, overlap, num_rows, depth, draft_s, *, rest_s=0.001, count=60):
    for _ in range(count):
        costs.passes.observe(num_rows, PASS_S)
        total_s = (max(draft_s, PASS_S) if overlap == "alternate" else draft_s + PASS_S) + rest_s
        costs.observe(overlap, num_rows, depth, total_s=total_s, draft_s=draft_s, verify_s=PASS_S)


def seconds(costs, overlap, num_rows, depth):
    return costs.seconds(overlap, num_rows, depth, [PASS_S])[0]


def test_drafts_cost_by_depth_and_none_cost_nothing():
    costs = RoundCost()
    for depth in (2, 4, 8, 1) * 3:
        learn(costs, "none", 4, depth, 0.001 * depth, count=10)
    for depth in (1, 4, 8):
        assert seconds(costs, "none", 4, depth) == pytest.approx(PASS_S + 0.001 * (1 + depth), rel=0.05)
    assert seconds(costs, "none", 4, 0) == pytest.approx(PASS_S + 0.001, rel=0.05)


def test_alternation_takes_the_longer_of_drafts_and_pass():
    costs = RoundCost()
    learn(costs, "none", 4, 4, 0.004)
    assert seconds(costs, "alternate", 4, 4) == pytest.approx(PASS_S + 0.001, rel=0.05)
    assert seconds(costs, "alternate", 4, 16) == pytest.approx(0.016 + 0.001, rel=0.08)
    learn(costs, "alternate", 4, 4, 0.004)
    assert seconds(costs, "alternate", 4, 4) == pytest.approx(PASS_S + 0.001, rel=0.05)


def test_running_ahead_hides_much_for_one_row_and_little_for_many_until_it_is_measured():
    costs = RoundCost()
    learn(costs, "none", 1, 4, 0.004)
    learn(costs, "none", 64, 4, 0.004)
    alone, many = (costs.wait_s("ahead", rows, 4) for rows in (1, 64))
    assert alone < 0.3 * 0.004
    assert 0.7 * 0.004 < many < 0.0042
    learn(costs, "ahead", 64, 4, 0.0005)
    assert costs.wait_s("ahead", 64, 4) == pytest.approx(0.0005, rel=0.1)
    assert costs.wait_s("none", 64, 4) == pytest.approx(0.004, rel=0.1)


def test_a_new_batch_size_begins_with_what_the_nearest_took():
    costs = RoundCost()
    learn(costs, "none", 4, 4, 0.004)
    learn(costs, "none", 64, 4, 0.012)
    assert costs.wait_s("none", 8, 4) == pytest.approx(0.004, rel=0.05)
    assert costs.wait_s("none", 33, 4) == pytest.approx(0.012, rel=0.05)
