"""What is counted as work that a round waited for."""

from engine.stats.preparation import Preparation


def test_only_work_that_was_not_expected_is_counted():
    preparation = Preparation()
    preparation.observe("compiled")  # while models load
    with preparation.expected():
        preparation.observe("compiled")
    assert not any(preparation.counts.values())
    preparation.observe("compiled")
    assert preparation.counts == {"compiled": 1, "not_recorded": 0, "eager": 0}
