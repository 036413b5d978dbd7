"""Messages come out of a stream as they went in, in whatever pieces it arrives; and the options of a connection."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import frames as frames_module
from cluster.transport.frames import FrameReader, frame, set_options


def test_a_tcp_connection_sends_at_once_and_notices_that_its_peer_has_vanished():
    """While sent data is unacknowledged, keepalive does not run: the user timeout ends the connection then."""
    with socket.socket() as connection:
        set_options(connection)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle, interval, count, user_ms = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * count <= 30
        assert 0 < user_ms <= 30_000


@given(payloads=st.lists(st.binary(max_size=50), max_size=8), sizes=st.lists(st.integers(1, 40), min_size=1))
def test_any_pieces_give_the_same_messages(payloads, sizes):
    stream = b"".join(frame(payload) for payload in payloads)
    frames, payloads_read, start = FrameReader(), [], 0
    while start < len(stream):
        for size in sizes:
            payloads_read += frames.feed(stream[start : start + size])
            start += size
    assert payloads_read == payloads


def test_too_long_a_message_is_refused_before_it_arrives(monkeypatch):
    monkeypatch.setattr(frames_module, "MAX_MESSAGE_BYTES", 10)
    frames = FrameReader()
    assert frames.feed(frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(MalformedMessageError, match="11 bytes announced, the limit is 10"):
        frames.feed(frame(b"x" * 11)[:4])
