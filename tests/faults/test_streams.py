"""What a client receives, joined; and a difference would be noticed."""

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


def test_chunks_are_joined_by_choice():
    delta = {"index": 1, "delta": {"content": "z"}, "logprobs": {"content": [{"logprob": -2.0}]}}
    last = [{"choices": [delta | {"finish_reason": "stop"}]}, {"usage": {"total_tokens": 3}}]
    result = received(chunk("a", 1), chunk("b", 2, reason="length"), *last)
    assert (result.texts, result.token_ids[0]) == ({0: "ab", 1: "z"}, [1, 2])
    assert result.logprobs == {0: [-1.0, -1.0], 1: [-2.0]}
    assert result.reasons == {0: "length", 1: "stop"}
    assert result.usage == {"total_tokens": 3}


def test_rounding_is_no_difference():
    assert received(chunk("a", 1, logprob=-1.0000001)).difference(received(chunk("a", 1))) is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (received(chunk("b", 1)), "texts: {0: 'b'} instead of {0: 'a'}"),
        (received(chunk("a", 2)), "choice 0: token 0 of 1: [2] instead of [1]"),
        (received(), "choice 0: token 0 of 1: [] instead of [1]"),
        (received(chunk("a", 1, logprob=-1.1)), "log probabilities of choice 0: [-1.1] instead of [-1.0]"),
        (received(chunk("a", 1, reason="stop")), "reasons: {0: 'stop'} instead of {}"),
        (received(chunk("a", 1), {"error": {"message": "lost"}}), "ends with lost after 1 of 1 tokens"),
        (Received(), "ends with no last event after 0 of 1 tokens"),
    ],
)
def test_a_difference_says_what_differs_and_an_end_that_is_missing_comes_first(other, difference):
    assert other.difference(received(chunk("a", 1))) == difference
