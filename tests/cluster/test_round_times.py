"""Deadlines of rounds: short where eight rounds like it were measured, whole where anything is new."""

from dataclasses import replace

import pytest

from cluster.round_times import _MAX_SHAPES, DraftTimes, RoundTimes, shape_of
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, Request, VerifyRow, chain

TIMEOUT_S = 60.0


def decoding(*drafts, context=100, **params):
    """Rows that decode after a prompt of ten tokens; their last token is committed and not computed yet."""
    params = SamplingParams(**params)
    return [
        VerifyRow(Request(str(i), [0] * context, 10, params), context - 1, 1, [1], chain([5] * length))
        for i, length in enumerate(drafts)
    ]


@pytest.mark.parametrize(
    ("seconds", "deadline_s"),
    [
        ([0.01] * 7, TIMEOUT_S),
        ([0.01] * 8, 5.0),
        ([0.1] * 7 + [1.0], 20.0),  # the longest, or one round in eight would be near its deadline
        ([4.0] + [0.3] * 8, 6.0),  # long ago
        ([5.0] * 8, TIMEOUT_S),
    ],
)
def test_a_deadline_is_twenty_times_the_longest_of_the_last_eight_rounds_of_its_shape(seconds, deadline_s):
    times = RoundTimes()
    for each in seconds:
        times.observe("a shape", each)
        times.observe(None, each)
    assert times.deadline_s("a shape", TIMEOUT_S) == pytest.approx(deadline_s)
    assert [times.deadline_s(shape, TIMEOUT_S) for shape in ("another", None)] == [TIMEOUT_S] * 2


def test_the_shapes_not_seen_for_longest_are_forgotten():
    times = RoundTimes()
    for number in range(_MAX_SHAPES + 5):
        for _ in range(8):
            times.observe("a frequent shape", 0.01)
            times.observe(number, 0.01)
    known = [times.deadline_s(shape, TIMEOUT_S) for shape in ("a frequent shape", 0, _MAX_SHAPES)]
    assert known == [5.0, TIMEOUT_S, 5.0]


def test_rounds_that_run_the_same_kernels_have_one_shape():
    assert shape_of(decoding(4, 4)) == shape_of(decoding(4, 4, context=120)) is not None
    assert shape_of(decoding(3, temperature=0.5)) == shape_of(decoding(3, temperature=0.9, seed=7))


SAMPLING = {
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "logit_bias": {1: 2.0},
    "grammar": "%llguidance {}",
    "logprobs": 2,
}
OTHERS = {
    "more rows": decoding(4, 4, 0),
    "another longest draft": decoding(3, 5),
    "fewer tokens": decoding(0, 4),
    "a context of twice the length": decoding(4, 4, context=200),
    "a tree": [replace(row, draft=Draft([5] * 4, [-1, -1, 0, 1])) for row in decoding(4, 4)],
    "drafts left to the target": [replace(row, draft=Draft(num_deferred=3)) for row in decoding(0, 0)],
} | {name: decoding(4, 4, **{name: value}) for name, value in SAMPLING.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_run_other_kernels_is_another_shape(name):
    assert shape_of(OTHERS[name]) != shape_of(decoding(4, 4))


@pytest.mark.parametrize("start", [0, 9])
def test_a_round_with_a_part_of_a_prompt_has_no_shape(start):
    prompt = VerifyRow(Request("p", [0] * 10, 10, SamplingParams()), start, 10 - start, [1], NO_DRAFT)
    assert shape_of([*decoding(4), prompt]) is None


@pytest.mark.parametrize(
    ("waits", "deadline_s"),
    [
        ([0.001] * 7, 1.0),
        ([0.001] * 8, 0.2),
        ([0.001] * 8 + [0.1], 0.4),
        ([0.5] * 8, 1.0),
        ([0.1] + [0.001] * 15, 0.4),
        ([0.1] + [0.001] * 16, 0.2),
    ],
)
def test_a_wait_for_drafts_is_bounded_by_recent_ones_and_never_shorter_than_a_garbage_collection(waits, deadline_s):
    times = DraftTimes()
    for seconds in waits:
        times.observe((), seconds)
    assert times.deadline_s((), 1.0) == pytest.approx(deadline_s)
