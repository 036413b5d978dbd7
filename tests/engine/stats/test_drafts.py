"""What the counters say after some drafts."""

import pytest

from engine.stats.drafts import SpeculationStats


def test_before_the_first_draft_rates_are_those_of_plain_decoding():
    stats = SpeculationStats()
    assert stats.mean_acceptance_length == 1


def test_acceptance_by_position_counts_each_draft_once_per_accepted_token():
    stats = SpeculationStats()
    stats.observe_draft(2, 1)
    stats.observe_draft(4, 3)
    stats.observe_draft(1, 0)
    stats.observe_draft(0, 0)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1, 0]
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 7, 4)
    assert (stats.num_accepted_tokens, stats.num_draft_tokens) == (4, 7)
    assert stats.mean_acceptance_length == pytest.approx(1 + 4 / 3)
