"""What is said of drafts that are not of use: after a minute, in the log once, on the metrics while it lasts."""

import logging
from collections import Counter

import pytest

from deployments.observe.draft_health import DraftHealth
from engine.stats.drafts import SpeculationStats


class Service:
    """An engine's counters, which a test lets grow by the second, and what is said of them."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.stats, self.fallbacks = SpeculationStats(), Counter[str]()
        self.rounds = [0.0, 0.0, 0.0, 0.0]
        self.health = DraftHealth(self.stats, self.fallbacks, lambda: self.now_s)

    def serve(self, seconds: int, *, length: int = 4, accepted: int = 2, lost: bool = False, each: int = 10) -> None:
        """Run `each` rounds of one row a second, which wait for their drafts for a tenth of their time."""
        for _ in range(seconds):
            self.now_s += 1
            used = 0 if lost else length
            self.stats.num_rounds_by_length[length, "goodput"] += each
            self.stats.num_draft_tokens += each * used
            self.stats.num_accepted_tokens += each * accepted * (used > 0)
            self.stats.num_generation_tokens += each * (1 + accepted * (used > 0))
            self.fallbacks["absent"] += each * lost
            grown = (each, *(0.05 * each * share for share in (1.0, 0.1, 0.4)))
            self.rounds = [count + by for count, by in zip(self.rounds, grown, strict=True)]
            self.health.observe(*self.rounds)

    @property
    def problems(self) -> set[str]:
        return {name for name, is_there in self.health.problems.items() if is_there}


@pytest.fixture
def service(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    caplog.set_level(logging.WARNING, "ray.serve")
    return Service()


def test_nothing_is_said_of_drafts_that_are_of_use_nor_of_idle_ones(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.serve(200)
    service.serve(200, each=0)
    assert (service.problems, caplog.messages) == (set(), [])
    assert service.health.problems.keys() == {"low_acceptance", "unused", "costs_more"}


def test_a_problem_is_said_after_a_minute_once_and_shown_until_a_minute_without_it(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        service.serve(59, length=8, accepted=1)
        assert service.problems == set()
        service.serve(2, length=8, accepted=1)
        assert service.problems == {"low_acceptance"}
        service.serve(59)
        service.serve(60)
        assert service.problems == set()
    assert len(caplog.messages) == 1
    assert "12% of" in caplog.text


def test_rounds_without_an_answer_are_counted_by_the_minute(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.serve(121, length=0)
    assert service.problems == {"costs_more", "unused"}
    service.serve(60, lost=True)
    assert service.problems == {"unused"}
    service.serve(60)
    assert service.problems == set()
    assert "none was used in 600 rounds: adaptive speculation" in caplog.text
