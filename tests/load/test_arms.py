"""Arms do what they are called, and intervals hold what they promise."""

import math

import pytest
from scipy import stats

from tests.load.arms import Arm, Ratio, parse_arms, speed_up, verdict
from tests.load.records import Acceptance, Record
from tests.load.server import Counters, LoadError

URL = "http://server"


def counters(num_drafts: int = 5, **rounds: float) -> Counters:
    return Counters(Acceptance(num_drafts, 4 * num_drafts, 2 * num_drafts), rounds)


def test_arms_become_fields_of_the_request() -> None:
    arms = parse_arms("off,limit-2,fixed-3,adaptive,fixed", URL, {"fixed": "http://other"})
    assert [arm.fields() for arm in arms] == [
        {"enabled": False},
        {"num_speculative_tokens": 2},
        {"num_speculative_tokens": 3, "fixed": True},
        {},
        {},
    ]
    assert [arm.url for arm in arms] == [URL, URL, URL, URL, "http://other"]


def test_an_arm_is_what_the_server_does() -> None:
    Arm("default", URL).check(None)
    Arm("off", URL).check(counters(0, fixed=3))
    Arm("limit-2", URL).check(counters(goodput=3))
    Arm("fixed", URL).check(counters(fixed=3))
    Arm("adaptive", URL).check(counters(goodput=3, trial=1))
    Arm("adaptive", URL).check(counters(0, goodput=3))  # it decided against drafts


@pytest.mark.parametrize(
    ("name", "seen", "message"),
    [
        ("off", counters(goodput=3), "drafted 20 tokens"),
        ("fixed", counters(goodput=3), "--arm-url fixed=URL"),
        ("adaptive", counters(fixed=3), "--arm-url adaptive=URL"),
        ("adaptive", counters(0, off=3), "drafted nothing"),
        ("fixed", counters(0, off=3), "drafted nothing"),
        ("limit-2", counters(0, off=3), "drafted nothing"),
        ("off", None, "cannot be checked"),
    ],
)
def test_an_arm_that_the_server_does_not_do_is_an_error(name: str, seen: Counters | None, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        Arm(name, URL).check(seen)


def test_the_interval_is_students() -> None:
    ratios = [1.1, 1.3, 1.2, 1.5]
    logs = [math.log(ratio) for ratio in ratios]
    low, high = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    found = Ratio.of(ratios)
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-4)


def request(index: int, arm: str, turn: int, tpot_s: float, outcome: str = "ok") -> Record:
    return Record(index, "d", 0, 0, arm=arm, turn=turn, outcome=outcome, chunks=[(0, 1), (4 * tpot_s, 5)], num_tokens=5)


def test_a_speed_up_compares_the_same_requests_of_the_same_turn() -> None:
    records = [
        *(request(0, arm, turn, t) for turn, t, arm in [(0, 4, "off"), (0, 2, "on"), (1, 8, "off"), (1, 4, "on")]),
        request(1, "off", 0, 100),
        request(1, "on", 0, 1, outcome="503"),  # so request 1 does not count in the other arm either
    ]
    ratio = speed_up(records, "on", "off")
    assert ratio is not None
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    assert speed_up(records, "on", "nothing") is None


def test_the_verdict_follows_from_the_interval() -> None:
    assert verdict("a", "b", Ratio(1.5, 1.2, 1.8)).endswith("it pays")
    assert "costs more" in verdict("a", "b", Ratio(0.8, 0.7, 0.9))
    assert "no difference" in verdict("a", "b", Ratio(1.1, 0.9, 1.3))
    assert "one turn" in verdict("a", "b", Ratio.of([1.5]))
