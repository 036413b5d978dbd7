"""A difference between two streams would be noticed."""

import pytest

from tests.faults.streams import Received


def received(*events):
    result = Received(has_ended=True)
    for event in events:
        result.add(event)
    return result


def chunk(text, token, logprob=-1.0, reason=None):
    scores = {"tokens": [text], "token_logprobs": [logprob]}
    choice = {"index": 0, "text": text, "token_ids": [token], "logprobs": scores, "finish_reason": reason}
    return {"choices": [choice], "usage": None}


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (received(chunk("a", 1, logprob=-1.0000001)), None),  # rounding depends on the batch
        (received(chunk("b", 1)), "choice 0: 'b' (None) instead of 'a' (None)"),
        (received(chunk("a", 2)), "choice 0: token 0 of 1: [2] instead of [1]"),
        (received(chunk("a", 1, logprob=-1.1)), "choice 0: log probabilities [-1.1] instead of [-1.0]"),
        (received(chunk("a", 1, reason="stop")), "choice 0: 'a' (stop) instead of 'a' (None)"),
        (received(chunk("a", 1), {"error": {"message": "lost"}}), "ends with lost after 1 of 1 tokens"),
        (Received(), "ends with no last event after 0 of 1 tokens"),
    ],
)
def test_a_difference_says_what_differs_and_an_end_that_is_missing_comes_first(other, difference):
    assert other.difference(received(chunk("a", 1))) == difference
