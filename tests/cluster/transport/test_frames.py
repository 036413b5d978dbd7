"""Messages come out of a stream as they went in, in whatever pieces it arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import frames as frames_module
from cluster.transport.frames import FrameReader, frame


@given(payloads=st.lists(st.binary(max_size=50), max_size=8), sizes=st.lists(st.integers(1, 40), min_size=1))
def test_any_pieces_give_the_same_messages(payloads: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    frames, payloads_read, start = FrameReader(), [], 0
    while start < len(stream):
        for size in sizes:
            payloads_read += frames.feed(stream[start : start + size])
            start += size
    assert payloads_read == payloads


def test_a_message_is_complete_with_its_last_byte() -> None:
    frames = FrameReader()
    stream = frame(b"abc") + frame(b"")
    assert [frames.feed(stream[i : i + 1]) for i in range(len(stream))] == [[]] * 6 + [[b"abc"]] + [[]] * 3 + [[b""]]


def test_too_long_a_message_is_refused_before_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_MESSAGE_BYTES", 10)
    frames = FrameReader()
    assert frames.feed(frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(MalformedMessageError, match="11 bytes announced, the limit is 10"):
        frames.feed(frame(b"x" * 11)[:4])
