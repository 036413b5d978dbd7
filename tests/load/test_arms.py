"""Arms do what they are called, and intervals hold what they promise."""

import math
import random

import pytest
from scipy import stats

from tests.load.arms import Arm, Ratio, in_turn, parse_arms, speed_up, verdict
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


@pytest.mark.parametrize("names", ["", "on", "off,off", "limit-0", "limit-", "fixed-0"])
def test_other_arms_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_arms(names, URL, {})


def test_an_address_for_an_arm_that_is_not_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="fixed"):
        parse_arms("off,adaptive", URL, {"fixed": "http://other"})


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


def test_every_arm_comes_first_as_often() -> None:
    arms = parse_arms("off,adaptive,limit-1", URL, {})
    orders = [[arm.name for arm in in_turn(arms, turn)] for turn in range(3)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert {order[0] for order in orders} == {"off", "adaptive", "limit-1"}


def test_the_interval_is_students() -> None:
    ratios = [1.1, 1.3, 1.2, 1.5]
    logs = [math.log(ratio) for ratio in ratios]
    low, high = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    found = Ratio.of(ratios)
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-4)


@pytest.mark.parametrize("degrees", [11, 15, 30, 100])
def test_the_quantile_beyond_the_table_is_near_students(degrees: int) -> None:
    assert 1.96 + 2.5 / degrees == pytest.approx(stats.t.ppf(0.975, degrees), rel=0.01)


@pytest.mark.parametrize("num_turns", [3, 5, 12])
def test_the_interval_holds_the_truth_in_95_of_100_runs(num_turns: int) -> None:
    rng = random.Random(num_turns)
    num_held = 0
    for _ in range(2000):
        found = Ratio.of([1.4 * math.exp(rng.gauss(0, 0.2)) for _ in range(num_turns)])
        assert found.low is not None
        assert found.high is not None
        num_held += found.low <= 1.4 <= found.high
    assert num_held / 2000 == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 2000))


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
