"""A difference between two answers would be noticed, and that both are wrong."""

import pytest

from tests.faults.answers import Answers
from tests.faults.streams import Received


def received(*events):
    result = Received(has_ended=True)
    for event in events:
        result.add(event)
    return result


def chunk(text, token, logprob=-1.0, reason="length", count=1):
    scores = {"tokens": [text], "token_logprobs": [logprob]}
    choice = {"index": 0, "text": text, "token_ids": [token], "logprobs": scores, "finish_reason": reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": count}}


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (received(chunk("a", 1, logprob=-1.0000001)), None),  # rounding depends on the batch
        (received(chunk("b", 1)), "choice 0: 'b' (length) instead of 'a' (length)"),
        (received(chunk("a", 2)), "choice 0: token 0 of 1: [2] instead of [1]"),
        (received(chunk("a", 1, logprob=-1.1)), "choice 0: log probabilities [-1.1] instead of [-1.0]"),
        (received(chunk("a", 1, reason="stop")), "choice 0: 'a' (stop) instead of 'a' (length)"),
        (received(chunk("a", 1, count=2)), "1 tokens came, and usage is {'prompt_tokens': 9, 'completion_tokens': 2}"),
        (received(chunk("a", 1), {"error": {"message": "lost"}}), "ends with lost after 1 tokens"),
        (Received(), "ends with no last event after 0 tokens"),
    ],
)
def test_a_difference_says_what_differs_and_an_end_that_is_missing_comes_first(other, difference):
    answers = Answers([])
    assert answers.difference(0, received(chunk("a", 1))) is None
    assert answers.difference(0, other) == difference


def test_an_answer_that_all_agree_on_is_audited_once():
    answers = Answers([("/v1/completions", {"prompt": "This PEP", "temperature": 0, "max_tokens": 1})])
    assert answers.difference(0, received(chunk("a", 1))) is None
    words = answers.audit()[0]
    assert words.startswith("choice 0, token 0: 1 ")
    assert answers.audit() == {}
