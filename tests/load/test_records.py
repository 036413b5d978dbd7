"""Latencies of one request."""

import json

import pytest

from tests.load.records import Acceptance, Record


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


def test_acceptance_is_counted_as_vllm_does() -> None:
    counts = Acceptance(10, 40, 15) + Acceptance(2, 8, 3) - Acceptance(2, 8, 3)
    assert (counts.rate, counts.mean_length) == (0.375, 2.5)
    assert (Acceptance().rate, Acceptance().mean_length) == (None, None)


def test_a_record_becomes_a_line_of_json() -> None:
    line = json.loads(json.dumps(record((2.0, 1), (3.0, 2)).as_json()))
    assert line["ttft_s"] == 1.0
    assert line["chunks"] == [[2.0, 1], [3.0, 2]]
    assert line["outcome"] == "ok"
