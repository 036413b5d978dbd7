"""Rounds that are cut; test_event_ids.py cuts them in streams."""

from deployments.ingress.pieces import rest_of
from engine.protocols import RoundTrace


def test_what_is_left_of_a_tree_is_below_the_last_token_that_was_sent() -> None:
    trace = RoundTrace(["a", "b", "c"], [1, 3], [5, 7, 8, 9], [-1, -1, 0, 1])
    assert rest_of(trace, 0) == trace
    assert rest_of(trace, 1) == RoundTrace(["b", "c"], [0], [9], [-1])
    assert rest_of(trace, 2) == RoundTrace(["c"], [], [], [])
    assert rest_of(trace, 3) == RoundTrace([], [], [], [])
