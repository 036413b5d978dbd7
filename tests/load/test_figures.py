"""What figures and verdicts mean: latencies, limits, ratios of arms, the capacity, and the times of an open loop."""

import asyncio
import itertools
import json
import math
from statistics import fmean, pstdev

import pytest
from scipy import stats

from tests.load.__main__ import main
from tests.load.arms import Arm, Ratio, speed_up, verdict
from tests.load.client import Clock, _take, data_of_events
from tests.load.loops import arrival_times, open_loop
from tests.load.records import Acceptance, Record, Slo
from tests.load.reference import difference
from tests.load.server import Counters, LoadError
from tests.load.summary import summarize
from tests.load.sweep import RESOLUTION, Level, capacity, search
from tests.load.traces import Arrival, excerpt, read


def record(*chunks: tuple[float, int], scheduled_s: float = 0.0, **fields: object) -> Record:
    num_tokens = chunks[-1][1] if chunks else 0
    return Record(0, "d", scheduled_s, scheduled_s, chunks=list(chunks), num_tokens=num_tokens, **fields)


def test_latencies_count_from_when_the_request_was_due_and_tokens_share_the_time_between_chunks():
    late = record((6.0, 2), (7.0, 4), (10.0, 5), scheduled_s=1.0)
    late.sent_s = 5.0
    assert (late.ttft_s, late.e2e_s, late.tpot_s) == (5.0, 9.0, 1.0)
    assert late.itl_s == [0.5, 0.5, 3.0]
    assert record((2.0, 0), (3.0, 0)).itl_s == []  # the server does not count by chunk
    assert record((2.0, 1)).tpot_s is None


def test_a_good_request_keeps_all_limits():
    slo = Slo.parse("ttft=500, tpot:20,itl=700", 0.5)
    assert slo.is_good(record((0.5, 1), (0.7, 11)))
    assert not slo.is_good(record((0.51, 1), (0.7, 11)))
    assert not slo.is_good(record((0.1, 1), (0.31, 11)))
    assert not slo.is_good(record((0.1, 1), (0.85, 2), (0.86, 99)))
    assert not slo.is_good(record((0.1, 1), (0.2, 11), outcome="429"))
    for text in ("speed=5", "ttft", "tpot=0", "tpot=nan"):
        with pytest.raises(ValueError, match=r".+"):
            Slo.parse(text, 1.0)


def test_turns_are_added_and_the_time_between_them_is_not():
    turns = [
        record((start + 1.0, 1), (start + 2.0, 11), scheduled_s=start, end_s=start + 2.0) for start in (0.0, 100.0)
    ]
    turns[1].turn = 1
    figures = summarize(turns, None)
    assert (figures["duration_s"], figures["requests_per_s"], figures["tokens_per_s"]) == pytest.approx((4.0, 0.5, 5.5))


def counters(num_drafts: int = 5, **rounds: float) -> Counters:
    return Counters(Acceptance(num_drafts, 4 * num_drafts, 2 * num_drafts), rounds)


@pytest.mark.parametrize(
    ("name", "seen", "message"),
    [
        ("default", None, None),
        ("off", counters(0, fixed=3), None),
        ("limit-2", counters(goodput=3), None),
        ("fixed", counters(fixed=3), None),
        ("adaptive", counters(0, goodput=3), None),  # it decided against drafts
        ("off", counters(goodput=3), "drafted 20 tokens"),
        ("fixed", counters(goodput=3), "--arm-url fixed=URL"),
        ("adaptive", counters(fixed=3), "--arm-url adaptive=URL"),
        ("adaptive", counters(0, off=3), "drafted nothing"),
        ("limit-2", counters(0, off=3), "drafted nothing"),
        ("off", None, "cannot be checked"),
    ],
)
def test_an_arm_that_the_server_does_not_do_is_an_error(name, seen, message):
    if message is None:
        Arm(name, "http://server").check(seen)
    else:
        with pytest.raises(LoadError, match=message):
            Arm(name, "http://server").check(seen)


def test_the_interval_is_students_and_the_verdict_follows_from_it():
    ratios = [1.1, 1.3, 1.2, 1.5]
    logs = [math.log(ratio) for ratio in ratios]
    low, high = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    found = Ratio.of(ratios)
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-4)
    assert verdict("a", "b", Ratio(1.5, 1.2, 1.8)).endswith("it pays")
    assert "costs more" in verdict("a", "b", Ratio(0.8, 0.7, 0.9))
    assert "no difference" in verdict("a", "b", Ratio(1.1, 0.9, 1.3))
    assert "one turn" in verdict("a", "b", Ratio.of([1.5]))


def test_a_speed_up_compares_the_same_requests_of_the_same_turn():
    def answered(index: int, arm: str, turn: int, tpot_s: float, outcome: str = "ok") -> Record:
        chunks = [(0.0, 1), (4 * tpot_s, 5)]
        return Record(index, "d", 0, 0, arm=arm, turn=turn, outcome=outcome, chunks=chunks, num_tokens=5)

    records = [
        *(answered(0, arm, turn, t) for turn, t, arm in [(0, 4, "off"), (0, 2, "on"), (1, 8, "off"), (1, 4, "on")]),
        answered(1, "off", 0, 100),
        answered(1, "on", 0, 1, outcome="503"),  # so request 1 does not count in the other arm either
    ]
    ratio = speed_up(records, "on", "off")
    assert ratio is not None
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


def test_an_answer_is_audited_with_the_text_that_came():
    answered = Record(0, "d", 0, 0)
    for event in ({"choices": [{"text": "ab"}]}, {"record": {"choices": [{"text": "abc"}]}}):
        _take(event, 1.0, answered)
    assert answered.kept == {"choices": [{"text": "ab"}]}


def test_a_text_that_differs_is_named_from_where_it_differs():
    assert difference("abc", "abc") is None
    assert difference("abd", "abc") == "differs from character 2 on: 'd' instead of 'c'"
    assert difference("ab", "abc") == "differs from character 2 on: '' instead of 'c'"


@pytest.mark.parametrize(
    ("limit", "first", "is_whole"), [(1, 1, True), (11, 1, True), (300, 1, True), (0.5, 0.5, False), (3.3, 0.5, False)]
)
def test_a_sweep_finds_the_capacity_within_its_resolution(limit, first, is_whole):
    steps = search(first=first, highest=256, is_whole=is_whole)
    levels, load = [], next(steps)
    while load is not None:
        levels.append(Level("a", load, load <= limit, {}))
        try:
            load = steps.send(levels[-1].holds)
        except StopIteration:
            break
    assert len({level.load for level in levels}) == len(levels) <= 13
    found = capacity(levels, "a")
    assert min(256, limit) / (1 + RESOLUTION) - is_whole < found <= min(256, limit)
    lucky = Level("a", 2 * limit, True, {})
    assert capacity([*levels, lucky], "a") == (2 * limit if limit == 300 else found)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_are_gamma_distributed(burstiness):
    """The coefficient of variation of a gamma distribution is 1 over the root of its shape."""
    count = 20_000
    times = [0.0, *arrival_times(5.0, burstiness, num_requests=count, seed=1)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    variation = 1 / math.sqrt(burstiness)
    assert fmean(gaps) == pytest.approx(0.2, rel=5 * variation / math.sqrt(count))
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.06)


async def test_an_open_loop_waits_for_no_answer_and_a_late_client_does_not_move_the_schedule():
    """Half of the requests are due before the loop can send any."""
    due: list[float] = []
    may_answer = asyncio.Event()

    async def send(index: int, due_s: float) -> Record:
        due.append(due_s)
        await may_answer.wait()
        return record()

    times = [-0.02, -0.01, 0.01, 0.02]
    loop = asyncio.create_task(open_loop(send, times, Clock()))
    while len(due) < len(times):
        await asyncio.sleep(0.001)
    assert not loop.done()
    may_answer.set()
    await loop
    assert [due_s - due[0] for due_s in due] == pytest.approx([time_s - times[0] for time_s in times])


STREAM = ': hello\n\ndata: {"a": "x\u2028y"}\r\n\r\nevent: ping\n\nid: 1\ndata: one\ndata:two\n\ndata: half'.encode()


@pytest.mark.parametrize("size", [1, 3, len(STREAM)])
async def test_events_do_not_depend_on_where_the_bytes_are_cut_and_arrive_with_their_piece(size):
    async def pieces():
        for start in range(0, len(STREAM), size):
            yield STREAM[start : start + size]

    events = [event async for event in data_of_events(pieces(), itertools.count().__next__)]
    assert [event[1:] for event in events] == [('{"a": "x\u2028y"}', ""), ("one\ntwo", "1")]
    ends = (STREAM.index(b"\r\n\r\n") + 4, STREAM.index(b"two\n\n") + 5)
    assert [event[0] for event in events] == [(end - 1) // size for end in ends]


def test_traces_are_read_and_cut_to_the_busiest_window_at_the_rate_asked_for(tmp_path):
    rows = [
        {"timestamp": 3500, "input_length": 700, "output_length": 0, "hash_ids": [46, 48]},
        {"timestamp": 500, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read(path) == [Arrival(0.0, 600, 52, (46, 47)), Arrival(3.0, 700, 1, (46, 48))]
    arrivals = [Arrival(time_s, 1, 1) for time_s in (0, 10, 20, 30, 31, 32, 33, 34, 50)]
    assert [arrival.time_s for arrival in excerpt(arrivals, duration_s=5, requests_per_s=None)] == [0, 1, 2, 3, 4]
    assert len(excerpt(arrivals, duration_s=5, requests_per_s=5 / 2)) == 10  # twice its 5 requests in 4 s


@pytest.mark.parametrize(
    "words",
    [
        "--rate 1 --concurrency 2",
        "--sweep",
        "--trace x.csv --requests 5",
        "--burstiness 2",
        "--arms off,adaptive --duration 5",
        "--arms sometimes",
        "--arm-url fixed=http://x",
        "--slo speed=1",
        "--api-key-file /dev/null",
    ],
)
def test_options_that_contradict_each_other_are_refused(words):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
