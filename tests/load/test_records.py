"""Latencies of one request, whether it keeps an SLO, and figures of many."""

import json

import pytest

from tests.load.records import Record, Slo
from tests.load.summary import Distribution, summarize


def record(*chunks: tuple[float, int], scheduled_s: float = 1.0, sent_s: float = 1.0) -> Record:
    num_tokens = chunks[-1][1] if chunks else 0
    return Record(0, "d", scheduled_s, sent_s, chunks=list(chunks), num_tokens=num_tokens)


def test_latencies_count_from_when_the_request_was_due() -> None:
    """A client that sends late because earlier answers are slow must not make the server look fast."""
    late = record((6.0, 1), (7.0, 2), scheduled_s=1.0, sent_s=5.0)
    assert (late.ttft_s, late.e2e_s) == (5.0, 6.0)


def test_time_per_token_leaves_the_first_token_out() -> None:
    assert record((2.0, 1), (3.0, 5), (4.0, 9)).tpot_s == pytest.approx(2 / 8)
    assert record((2.0, 1)).tpot_s is None
    assert record().latencies_s("ttft") == []


def test_the_time_between_chunks_is_shared_by_their_tokens() -> None:
    assert record((2.0, 2), (3.0, 4), (6.0, 5)).itl_s == [0.5, 0.5, 3.0]
    assert record((2.0, 0), (3.0, 0)).itl_s == []  # the server does not count by chunk


def answered(ttft_s: float, tpot_s: float = 0.01, outcome: str = "ok") -> Record:
    return Record(0, "d", 0.0, 0.0, outcome=outcome, chunks=[(ttft_s, 1), (ttft_s + 10 * tpot_s, 11)], num_tokens=11)


def test_limits_are_read_with_either_sign() -> None:
    assert Slo.parse("ttft=500, tpot=50.5", 1.0).limits_ms == (("ttft", 500.0), ("tpot", 50.5))
    assert Slo.parse("e2e:9000", 1.0).limits_ms == (("e2e", 9000.0),)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=x", "speed=5", "tpot=0", "tpot=-1", "tpot=nan"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Slo.parse(text, 1.0)


def test_a_good_request_keeps_all_limits() -> None:
    slo = Slo((("ttft", 500.0), ("tpot", 20.0)), 0.5)
    assert slo.is_good(answered(0.5))
    assert not slo.is_good(answered(0.51))
    assert not slo.is_good(answered(0.1, tpot_s=0.021))
    assert not slo.is_good(answered(0.1, outcome="429"))


def test_the_slowest_token_counts_for_itl() -> None:
    stalled = Record(0, "d", 0.0, 0.0, chunks=[(0.1, 1), (0.2, 2), (1.2, 3)], num_tokens=3)
    assert Slo((("itl", 1001.0),), 1.0).is_good(stalled)
    assert not Slo((("itl", 999.0),), 1.0).is_good(stalled)


def test_percentiles_are_interpolated_and_in_milliseconds() -> None:
    found = Distribution.of([i / 1000 for i in range(101)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == pytest.approx((50, 90, 99, 100, 50))
    assert Distribution.of([]) is None


def test_turns_are_added_and_the_time_between_them_is_not() -> None:
    turns = [answered(1.0, tpot_s=0.1), answered(1.0, tpot_s=0.1)]
    turns[1].turn, turns[1].chunks = 1, [(time_s + 100, count) for time_s, count in turns[1].chunks]
    turns[1].scheduled_s = turns[1].sent_s = 100.0
    for turn in turns:
        turn.end_s = turn.chunks[-1][0]
    figures = summarize(turns, None)
    assert (figures.duration_s, figures.requests_per_s) == pytest.approx((4.0, 0.5))
    failed = answered(1.0, outcome="503")
    assert summarize([failed], None).latencies_ms["ttft"] is None
    json.dumps(summarize([failed], Slo((("ttft", 1.0),), 0.9)).as_json())
