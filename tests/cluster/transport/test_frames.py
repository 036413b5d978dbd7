"""Messages come out of a stream as they went in, wherever it was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import frames as frames_module
from cluster.transport.frames import Frames, frame


@given(payloads=st.lists(st.binary(max_size=50), max_size=8), sizes=st.lists(st.integers(1, 40), min_size=1))
def test_any_cut_gives_the_same_messages(payloads: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    frames, found, start = Frames(), [], 0
    while start < len(stream):
        for size in sizes:
            found += frames.feed(stream[start : start + size])
            start += size
    assert found == payloads


def test_a_message_comes_with_its_last_byte() -> None:
    frames = Frames()
    stream = frame(b"abc") + frame(b"")
    assert [frames.feed(stream[i : i + 1]) for i in range(len(stream))] == [[]] * 6 + [[b"abc"]] + [[]] * 3 + [[b""]]


def test_too_much_is_refused_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_MESSAGE_BYTES", 10)
    frames = Frames()
    assert frames.feed(frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(MalformedMessageError, match="11 bytes announced, the limit is 10"):
        frames.feed(frame(b"x" * 11)[:4])
