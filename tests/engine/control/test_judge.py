"""Whether drafts pay, by what 600 rounds of a row took and committed."""

from collections import Counter

import pytest

from engine.control.judge import PROBLEMS, Rounds, problems, speed_up


def rounds(num_rounds=600, *, length=4, accepted=2, wait=0.1, busy=0.4, plain=(), lost=(), proposes=True) -> Rounds:
    """Rounds of 50 ms that wait for drafts for a share of it, and for a share of which the target is busy."""
    drafted = num_rounds - sum(dict(plain).values()) if proposes else 0
    drafted -= sum(dict(lost).values())
    return Rounds(
        num_rounds,
        0.05 * num_rounds,
        0.05 * num_rounds * wait,
        0.05 * num_rounds * busy,
        drafted * length,
        drafted * accepted,
        num_rounds + drafted * accepted,
        Counter(dict(plain)),
        Counter(dict(lost)),
    )


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        ({}, {}),
        ({"num_rounds": 0}, {}),
        ({"num_rounds": 49, "accepted": 0}, {}),
        ({"length": 8, "accepted": 1, "wait": 0.0}, {"low_acceptance": "12% of 4800: few draft tokens"}),
        ({"length": 6, "accepted": 1, "wait": 0.0}, {}),  # one of six is enough
        ({"plain": {"request": 600}}, {"unused": "in 600 rounds: the requests turn it off"}),
        ({"plain": {"off": 400, "request": 200}}, {"unused": "speculation is off"}),
        ({"lost": {"timeout": 600}}, {"unused": "its worker did not answer (timeout)"}),
        ({"plain": {"request": 200}, "lost": {"timeout": 100, "absent": 300}}, {"unused": "did not answer (absent)"}),
        ({"proposes": False}, {"unused": "none was proposed"}),
        ({"plain": {"goodput": 480}}, {"costs_more": "adaptive speculation measured that they do not pay"}),
        ({"plain": {"goodput": 600}}, {"costs_more": "at this load", "unused": "adaptive speculation measured"}),
        ({"plain": {"goodput": 300}}, {}),
        # Two tokens in a round that is 1.82 times as long as without waiting gain; 2.22 times as long is a loss.
        ({"accepted": 1, "wait": 0.45}, {}),
        ({"accepted": 1, "wait": 0.55}, {"costs_more": "0.90 times the tokens per second"}),
        # Waiting while the target computes costs nothing.
        ({"accepted": 1, "wait": 0.95, "busy": 0.9}, {}),
        ({"accepted": 1, "wait": 0.95, "busy": 0.45}, {"costs_more": "0.90 times"}),
    ],
)
def test_what_is_wrong_with_drafts_is_said_with_its_reason(counted, expected):
    found = problems(rounds(**counted))
    assert found.keys() == expected.keys() <= PROBLEMS.keys()
    assert [name for name in expected if expected[name] not in found[name]] == []


def test_the_speed_up_is_tokens_a_round_over_its_relative_time():
    assert speed_up(100, 60, 5, 4) == pytest.approx(2.5 * 0.8)
