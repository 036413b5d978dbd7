"""What the counters say after some drafts."""

import pytest

from engine.stats import RunAheadStats, SpeculationStats


def test_before_the_first_draft_rates_are_those_of_plain_decoding():
    stats = SpeculationStats()
    assert stats.acceptance_rate == 0
    assert stats.mean_acceptance_length == 1


def test_an_empty_draft_is_not_counted():
    stats = SpeculationStats()
    stats.observe_draft(0, 0)
    assert stats == SpeculationStats()


def test_rates_count_draft_tokens_and_the_targets_own():
    stats = SpeculationStats()
    stats.observe_draft(4, 4)
    stats.observe_draft(4, 1)
    assert stats.acceptance_rate == pytest.approx(5 / 8)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 2)


def test_acceptance_by_position_counts_each_draft_once_per_accepted_token():
    stats = SpeculationStats()
    stats.observe_draft(2, 1)
    stats.observe_draft(4, 3)
    stats.observe_draft(1, 0)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1, 0]
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 7, 4)


def test_rounds_are_counted_by_their_length_and_its_reason():
    stats = SpeculationStats()
    for k, reason in ((4, "goodput"), (4, "goodput"), (0, "trial"), (4, "trial")):
        stats.observe_round(k, reason)
    assert stats.num_rounds == 4
    assert stats.num_rounds_by_length == {(4, "goodput"): 2, (0, "trial"): 1, (4, "trial"): 1}


def test_two_sets_of_counters_are_independent():
    first, second = SpeculationStats(), SpeculationStats()
    first.observe_draft(1, 1)
    first.observe_round(1, "fixed")
    assert second == SpeculationStats()
    RunAheadStats().misses["token"] = 1
    assert RunAheadStats().misses == {}
