"""Figures of many requests."""

import json

import pytest

from tests.load.records import Acceptance, Record, Slo
from tests.load.summary import Distribution, summarize


def request(index: int, ttft_s: float, *, arm: str = "off", turn: int = 0, start_s: float = 0.0) -> Record:
    first_s = start_s + ttft_s
    return Record(
        index,
        f"d{index % 2}",
        start_s,
        start_s,
        arm=arm,
        turn=turn,
        chunks=[(first_s, 1), (first_s + 1, 5)],
        end_s=first_s + 1,
        num_prompt_tokens=10,
        num_tokens=5,
        acceptance=Acceptance(1, 4, 2),
        histogram=[0, 0, 1],
    )


def test_percentiles_are_interpolated_and_in_milliseconds() -> None:
    found = Distribution.of([i / 1000 for i in range(101)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == pytest.approx((50, 90, 99, 100, 50))
    assert Distribution.of([]) is None


def test_refused_and_failed_requests_are_counted_apart() -> None:
    records = [request(i, 1.0) for i in range(4)]
    for record, outcome in zip(records[1:], ("429", "503", "cut"), strict=True):
        record.outcome = outcome
    figures = summarize(records, Slo((("ttft", 5000.0),), 0.5))
    assert (figures.num_requests, figures.num_ok, figures.num_rejected) == (4, 1, 1)
    assert figures.failures == {"503": 1, "cut": 1}
    assert figures.good_share == 0.25
    assert figures.tokens_per_s == 5 / 2
    assert figures.goodput_per_s == 1 / 2


def test_turns_are_added_and_the_time_between_them_is_not() -> None:
    records = [request(0, 1.0), request(0, 1.0, turn=1, start_s=100.0)]
    figures = summarize(records, None)
    assert figures.duration_s == pytest.approx(4.0)
    assert figures.requests_per_s == pytest.approx(0.5)


def test_acceptance_is_that_of_the_requests_or_else_the_servers() -> None:
    records = [request(0, 1.0), request(1, 1.0)]
    assert summarize(records, None, acceptance=Acceptance(9, 9, 9)).acceptance == Acceptance(2, 8, 4)
    assert summarize(records, None).histogram == [0, 0, 2]
    for record in records:
        record.acceptance = None
    assert summarize(records, None, acceptance=Acceptance(9, 9, 9)).acceptance == Acceptance(9, 9, 9)
    assert summarize(records, None).acceptance is None


def test_a_summary_is_json_even_if_nothing_succeeded() -> None:
    failed = request(0, 1.0)
    failed.outcome = "503"
    for records in ([failed], [], [request(0, 1.0)]):
        json.dumps(summarize(records, Slo((("ttft", 1.0),), 0.9)).as_json())
    assert summarize([failed], None).latencies_ms["ttft"] is None
