"""What is said of drafts that are not of use: after a minute, in the log once, on the metrics while it lasts."""

import logging
from collections import Counter

import pytest

from deployments.observe.draft_health import PERIOD_S, DraftHealth
from engine.control.stats import SpeculationStats


class Service:
    """An engine's counters, which a test lets grow by the second, and what is said of them."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.stats, self.fallbacks = SpeculationStats(), Counter[str]()
        self.rounds = [0.0, 0.0, 0.0, 0.0]
        self.health = DraftHealth(self.stats, self.fallbacks, lambda: self.now_s)

    def serve(
        self, seconds: int, *, length: int = 4, accepted: int = 2, reason: str = "goodput", wait: float = 0.1,
        lost: str | None = None, proposes: bool = True, each: int = 10, busy: float = 0.4,
    ) -> None:  # fmt: skip
        """Run `each` rounds of one row a second.

        They wait for their drafts for a share of their time, and for a share of it the target is busy.
        """
        for _ in range(seconds):
            self.now_s += 1
            stats, used = self.stats, 0 if lost or not proposes else length
            stats.num_rounds_by_length[length, reason] += each
            stats.num_draft_tokens += each * used
            stats.num_accepted_tokens += each * (accepted if used else 0)
            stats.num_generation_tokens += each * (1 + (accepted if used else 0))
            if lost:
                self.fallbacks[lost] += each
            grown = (each, *(0.05 * each * share for share in (1.0, wait, busy)))
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


def test_low_acceptance_is_said_after_a_minute_once_and_shown_until_it_ends(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.serve(58, length=8, accepted=1, wait=0.0)
    assert service.problems == set()
    service.serve(10, length=8, accepted=1, wait=0.0)
    assert service.problems == {"low_acceptance"}
    service.serve(70, length=6, accepted=1, wait=0.0)  # one of six is enough
    assert service.problems == set()
    service.serve(70, length=8, accepted=1, wait=0.0)
    assert service.problems == {"low_acceptance"}
    assert len(caplog.messages) == 1
    assert "12% of" in caplog.text
    assert "take a draft of the target's family" in caplog.text


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"length": 0, "reason": "request"}, "the requests turn it off"),
        ({"length": 0, "reason": "off"}, "speculation is off"),
        ({"lost": "timeout"}, "its worker did not answer (timeout)"),
        ({"proposes": False}, "none was proposed"),
    ],
)
def test_a_draft_that_is_not_used_is_told_with_the_reason(
    service: Service, caplog: pytest.LogCaptureFixture, how: dict[str, str], why: str
) -> None:
    service.serve(70, **how)  # type: ignore[arg-type]
    assert service.problems == {"unused"}
    assert f"none was used in 600 rounds: {why}" in caplog.text


def test_adaptive_rounds_without_drafts_mean_that_these_cost_more_than_they_bring(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(8):
        service.serve(8, length=0)
        service.serve(2, reason="trial")
    assert service.problems == {"costs_more"}
    assert "at this load: adaptive speculation measured that they do not pay" in caplog.text
    service.serve(70, length=0)
    assert service.problems == {"costs_more", "unused"}


def test_waiting_longer_than_accepted_tokens_save_is_a_loss_whatever_the_length_is_chosen_by(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tokens in a round that is 1.82 times as long as without waiting gain; 2.22 times as long is a loss."""
    service.serve(70, reason="fixed", accepted=1, wait=0.55)
    assert service.problems == {"costs_more"}
    assert "2.00 times the tokens of a round, and waiting for drafts makes it 2.22 times as long" in caplog.text


def test_counters_are_read_every_few_seconds(service: Service) -> None:
    service.serve(500)
    assert len(service.health._window) <= 60 / PERIOD_S + 2


@pytest.mark.parametrize(
    ("wait", "busy", "problems"), [(0.45, 0.4, set()), (0.95, 0.9, set()), (0.95, 0.45, {"costs_more"})]
)
def test_waiting_less_than_accepted_tokens_save_or_while_the_target_computes_is_no_loss(
    service: Service, wait: float, busy: float, problems: set[str]
) -> None:
    service.serve(70, reason="fixed", accepted=1, wait=wait, busy=busy)
    assert service.problems == problems


def test_rounds_without_a_draft_are_counted_within_the_window(service: Service) -> None:
    service.serve(300, length=0)
    service.serve(70)
    assert service.problems == set()


def test_more_rounds_without_an_answer_than_without_a_plan_name_the_worker(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.serve(30, length=0)
    service.serve(40, lost="absent")
    assert "its worker did not answer (absent)" in caplog.text
