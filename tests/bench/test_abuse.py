"""What counts as noticed."""

from collections import Counter

from tests.bench.abuse import ABUSES, Notice, Outcome


def outcome(gap_s: float, live_s: float, late_s: float = 0.0, status: int = 400) -> list[str]:
    quiet = Notice(gaps_s=[0.1], live_s=[0.01])
    notice = Notice(gaps_s=[0.0, gap_s], live_s=[live_s], late_s=late_s)
    return Outcome("x", Counter({status: 3, 0: 1}), 1.0, quiet, notice).failures((400,))


def test_a_gap_a_slow_answer_and_a_wrong_status_are_noticed() -> None:
    assert outcome(0.34, 0.09) == []
    assert outcome(0.36, 0.09) == ["x: a gap of 0.360 s, normally 0.100 s"]
    assert outcome(0.34, 0.11) == ["x: /live took 0.110 s, normally 0.010 s"]
    assert outcome(0.34, 0.09, status=500) == ["x: answers {500: 3, 0: 1}"]


def test_a_client_that_waits_for_a_core_itself_allows_for_that() -> None:
    assert outcome(0.88, 0.29, late_s=0.1) != []
    assert outcome(0.88, 0.29, late_s=0.11) == []


def test_bodies_are_of_the_size_that_the_server_takes() -> None:
    assert all(len(abuse.body) < 4 * 2**20 for abuse in ABUSES.values())
