"""The worker's end: what it answers, what it drops, and how it ends."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.protocol.messages import AnyReply, AnyRequest, encode
from cluster.transport import frames as frames_module
from cluster.transport.channel import ConnectionLostError, DeadlineError
from cluster.transport.credentials import Credentials, make_credentials, tls_context
from cluster.transport.frames import frame
from cluster.transport.server import Server
from engine.errors import TargetError
from tests.cluster.wire import connected, ping, pong, serving


@pytest.fixture
def credentials() -> Credentials:
    return make_credentials()


async def test_a_reply_that_is_overdue_is_not_sent(credentials: Credentials) -> None:
    def answer(request: AnyRequest) -> AnyReply:
        if request.round == 1:
            threading.Event().wait(0.5)
        return pong(request)

    with serving(credentials, answer) as server, connected(server.endpoint, credentials) as channel:
        with pytest.raises(DeadlineError):
            await channel.call(ping(1, deadline_s=0.2))
        assert (await channel.call(ping(2))).round == 2
        assert server.num_overdue == 1
        assert not channel.dropped


async def test_malformed_messages_leave_the_server_alive(credentials: Credentials) -> None:
    with serving(credentials) as server, connected(server.endpoint, credentials) as channel:
        await channel._send(b"\xc1 no message")
        await channel.call(ping(1))
        assert server.num_malformed == 1


async def test_who_announces_too_much_is_dropped_and_may_come_again(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_module, "MAX_MESSAGE_BYTES", 1000)
    with serving(credentials) as server, connected(server.endpoint, credentials) as channel:
        with pytest.raises(ConnectionLostError):
            await channel.call(ping(1, released=["x" * 2000]))
        await channel.call(ping(2))
        assert server.num_malformed == 1


async def test_half_a_message_keeps_no_work_waiting(credentials: Credentials) -> None:
    """A drafter goes on with its passes while the rest of a request is on its way."""
    num_passes = 0
    has_worked = threading.Event()

    def work() -> bool:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 100:
            has_worked.set()
        return True

    with serving(credentials, work=work) as server, socket.socket(socket.AF_UNIX) as client:
        client.connect(server.endpoint.path)
        first, second = (frame(encode(ping(number))) for number in (1, 2))
        client.sendall(first + second[:-1])
        assert client.recv(1000) == frame(encode(pong(ping(1))))
        assert has_worked.wait(10)
        client.sendall(second[-1:])
        assert client.recv(1000) == frame(encode(pong(ping(2))))


def test_a_client_that_comes_again_replaces_itself(credentials: Credentials) -> None:
    """What was left of the old connection, half a message or whole ones, is not taken for the new one's."""
    with serving(credentials) as server:
        tls = tls_context(credentials, server.endpoint.certificate, is_server=False)
        address = (server.endpoint.host, server.endpoint.port)
        with tls.wrap_socket(socket.create_connection(address)) as old:
            old.sendall(frame(encode(ping(1))))
            assert old.recv(1000) == frame(encode(pong(ping(1))))
            old.sendall(frame(encode(ping(2)))[:-1])
            with tls.wrap_socket(socket.create_connection(address)) as new:
                new.sendall(frame(encode(ping(3))))
                assert new.recv(1000) == frame(encode(pong(ping(3))))
                assert old.recv(1000) == b""


async def test_what_ends_it_ends_the_call_at_once(credentials: Credentials) -> None:
    """A rank that fails must not be waited for: its group starts all of them anew."""

    def answer(request: AnyRequest) -> AnyReply:
        raise TargetError("rank 0 was sent round 3 after round 1")

    server = Server("127.0.0.1", credentials.certificate)
    with ThreadPoolExecutor(1) as thread, connected(server.endpoint, credentials) as channel:
        serving_ends = thread.submit(server.serve, answer)
        with pytest.raises(ConnectionLostError):
            await channel.call(ping(1, deadline_s=60))
        assert isinstance(await asyncio.to_thread(serving_ends.exception, 10), TargetError)


def test_it_polls_without_waiting(credentials: Credentials) -> None:
    server = Server("127.0.0.1", credentials.certificate)
    assert not server.poll()
    server.stop()
    server.serve(pong)
    assert not Path(server.endpoint.path).exists()
