"""What a client receives, joined; and a difference would be noticed."""

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
    delta = {
        "index": 1,
        "delta": {"content": "z"},
        "logprobs": {"content": [{"logprob": -2.0}]},
        "finish_reason": "stop",
    }
    result = received(
        chunk("a", 1), chunk("b", 2, reason="length"), {"choices": [delta]}, {"usage": {"total_tokens": 3}}
    )
    assert (result.texts, result.token_ids[0]) == ({0: "ab", 1: "z"}, [1, 2])
    assert result.logprobs == {0: [-1.0, -1.0], 1: [-2.0]}
    assert result.reasons == {0: "length", 1: "stop"}
    assert result.usage == {"total_tokens": 3}


def test_any_difference_but_rounding_is_noticed():
    same = received(chunk("a", 1))
    assert received(chunk("a", 1, logprob=-1.0000001)).equals(same)
    for other in (
        received(chunk("b", 1)),
        received(chunk("a", 2)),
        received(chunk("a", 1, logprob=-1.1)),
        received(chunk("a", 1, reason="stop")),
        received(chunk("a", 1), {"usage": {"total_tokens": 1}}),
        received(chunk("a", 1), {"error": {"message": "lost"}}),
        Received(texts={0: "a"}, token_ids={0: [1]}, logprobs={0: [-1.0]}),
    ):
        assert not other.equals(same)
