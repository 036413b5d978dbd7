"""What is encoded comes back the same, and what is no message is refused."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol import messages
from cluster.protocol.messages import (
    Drafts,
    Failure,
    MalformedMessageError,
    Ping,
    Pong,
    PrefixDelta,
    PrefixMissing,
    Propose,
    ProposeEntry,
    Verdicts,
    Verify,
    VerifyEntry,
    decode_reply,
    decode_request,
    encode,
)
from engine.params import SamplingParams
from engine.protocols import Draft, SlotRow, TokenLogprobs, Verdict, chain

PARAMS = SamplingParams(
    temperature=0.7,
    top_k=5,
    logit_bias={3: -1.5},
    seed=-4,
    stop=["a", "ü"],
    stop_token_ids=[7],
    logprobs=2,
    grammar="start: /ü/",
)
DELTAS = st.builds(
    PrefixDelta,
    request_id=st.text(max_size=8),
    offset=st.integers(0, 2**31),
    token_ids=st.lists(st.integers(0, 2**20), max_size=8),
    prompt_length=st.integers(0, 2**20),
    params=st.sampled_from([None, SamplingParams(), PARAMS]),
    block_offset=st.integers(0, 2**20),
    block_ids=st.lists(st.integers(0, 2**31), max_size=4),
)
DRAFTS = st.one_of(
    st.lists(st.integers(0, 2**20), max_size=5).map(chain), st.just(Draft([4], [-1], [[4, 9]], [[0.75, 0.25]]))
)
STATES = st.sampled_from([None, SlotRow(1, 0), SlotRow(2**31, 7, 64, ((2**20, 1), (2**20 + 64, 2)))])
HEAD = {
    "round": st.integers(0, 2**40),
    "version": st.integers(0, 2**31),
    "deadline_s": st.floats(0, 1e6),
    "released": st.lists(st.text(max_size=4), max_size=3),
}
REQUESTS = st.one_of(
    st.builds(Propose, **HEAD, rows=st.lists(st.builds(ProposeEntry, DELTAS, st.integers(0, 64)), max_size=3)),
    st.builds(
        Verify,
        **HEAD,
        rows=st.lists(
            st.builds(VerifyEntry, DELTAS, st.integers(0, 99), st.integers(0, 99), DRAFTS, STATES), max_size=3
        ),
    ),
    st.builds(Ping, **HEAD),
)


@settings(max_examples=50)
@given(REQUESTS)
def test_a_request_comes_back_the_same(request):
    assert decode_request(encode(request)) == request


@pytest.mark.parametrize(
    "reply",
    [
        Drafts(3, 1, 0.5, [chain([1, 2]), Draft([4], [-1], [[4]], [[1.0]])]),
        Verdicts(3, 1, 0.5, [Verdict([1, 2], [0], [TokenLogprobs(-0.5, 1, [1], [-0.5])]), Verdict()]),
        Verdicts(3, 1, 0.5, [Verdict([1], [], [TokenLogprobs(-math.inf, 9, [], [])])]),
        PrefixMissing(3, 1, 0.5, ["a", "b"]),
        Failure(3, 1, 0.5, "no memory"),
        Pong(3, 1, 0.5),
    ],
    ids=lambda reply: type(reply).__name__,
)
def test_a_reply_comes_back_the_same(reply):
    assert decode_reply(encode(reply)) == reply


@settings(max_examples=100)
@given(st.binary(max_size=64))
def test_other_bytes_are_refused_with_one_exception(payload):
    for decode in (decode_request, decode_reply):
        with pytest.raises(MalformedMessageError):
            decode(payload)


def test_parameters_outside_their_range_are_refused():
    request = Propose(1, 1, 1.0, [], [ProposeEntry(PrefixDelta("a", 0, [1], 1, SamplingParams()), 1)])
    raw = msgspec.msgpack.decode(encode(request))
    raw[5][0][0][4]["top_p"] = 7.0
    with pytest.raises(MalformedMessageError, match="top_p"):
        decode_request(msgspec.msgpack.encode(raw))


def test_a_message_above_the_size_limit_is_not_sent(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(MalformedMessageError, match="limit is 10"):
        encode(Failure(1, 1, 0.0, "x" * 20))
