"""Rounds that are cut; test_event_ids.py cuts them in streams."""

from dataclasses import replace

import pytest

from deployments.ingress.pieces import Sent, join, rest_of, split
from engine.protocols import TokenLogprobs
from engine.requests.output import RoundTrace
from tests.deployments.fakes import output


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_round_is_cut_where_the_last_event_was(count: int) -> None:
    scores = [TokenLogprobs(-float(token), 1, [], []) for token in range(5)]
    figures = {"num_draft_tokens": 6, "num_accepted_tokens": 3}
    whole = output(*range(5), text="01234", logprobs=scores, finish_reason="length", **figures)
    [first], [rest] = split([whole], Sent(count, count))
    assert (first.token_ids, first.finish_reason, first.num_draft_tokens) == ([*range(count)], None, 0)
    assert join([first, rest]) == replace(whole, num_accepted_tokens=max(0, 3 - count))


def test_what_is_left_of_a_tree_is_below_the_last_token_that_was_sent() -> None:
    trace = RoundTrace(["a", "b", "c"], [1, 3], [5, 7, 8, 9], [-1, -1, 0, 1])
    assert rest_of(trace, 0) == trace
    assert rest_of(trace, 1) == RoundTrace(["b", "c"], [0], [9], [-1])
    assert rest_of(trace, 2) == RoundTrace(["c"], [], [], [])
    assert rest_of(trace, 3) == RoundTrace([], [], [], [])
