"""What is said of drafts that are not of use: after a minute, in the log once, on the metrics while it lasts."""

import logging
from collections import Counter

import pytest

from deployments.observe import draft_health
from deployments.observe.draft_health import DraftHealth
from engine.stats.drafts import SpeculationStats
from tests.fakes import Clock


def test_a_problem_is_said_after_a_minute_once_and_shown_until_a_minute_without_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_health, "logger", logging.getLogger("of the test"))
    clock, stats, fallbacks = Clock(1000.0), SpeculationStats(), Counter[str]()
    health = DraftHealth(stats, fallbacks, clock)

    def problems_after(seconds: int, *, accepted: int = 6, lost: bool = False) -> set[str]:
        """Run ten rounds a second with drafts of eight, which may be lost."""
        for _ in range(seconds):
            clock.now += 1
            stats.num_rounds_by_length[8, "goodput"] += 10
            stats.num_draft_tokens += 80 * (not lost)
            stats.num_accepted_tokens += 10 * accepted * (not lost)
            stats.num_generation_tokens += 10 + 10 * accepted * (not lost)
            fallbacks["absent"] += 10 * lost
            num_rounds = stats.num_rounds_by_length.total()
            health.observe(num_rounds, 0.05 * num_rounds, 0.0, 0.03 * num_rounds)
        return {name for name, is_there in health.problems.items() if is_there}

    for _ in range(2):
        assert problems_after(59, accepted=1) == set()
        assert problems_after(2, accepted=1) == {"low_acceptance"}
        assert problems_after(119) == set()
    assert len(caplog.messages) == 1
    assert "12% of" in caplog.text
    assert problems_after(121, lost=True) == {"unused"}
