"""The worker's end of a connection: what it answers, what it drops, and how it ends."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.protocol.messages import AnyReply, AnyRequest, encode
from cluster.transport import frames as frames_module
from cluster.transport.credentials import Credentials, make_credentials, tls_context
from cluster.transport.errors import ConnectionLostError, DeadlineError
from cluster.transport.frames import frame
from engine.errors import TargetError
from tests.cluster.wire import connected, make_server, ping, pong, serving


@pytest.fixture
def credentials() -> Credentials:
    return make_credentials()


async def test_a_reply_after_its_deadline_is_not_sent(
    credentials: Credentials, dropped: Callable[[], Counter[str]]
) -> None:
    def answer(request: AnyRequest) -> AnyReply:
        if request.round == 1:
            threading.Event().wait(0.5)
        return pong(request)

    with serving(credentials, answer) as server, connected(server.endpoint, credentials) as channel:
        with pytest.raises(DeadlineError):
            await channel.call(ping(1, deadline_s=0.2))
        assert (await channel.call(ping(2))).round == 2
        assert dropped() == {"overdue": 1}


async def test_a_malformed_message_is_dropped(credentials: Credentials, dropped: Callable[[], Counter[str]]) -> None:
    with serving(credentials) as server, connected(server.endpoint, credentials) as channel:
        await channel._send(b"\xc1 no message")
        await channel.call(ping(1))
        assert dropped() == {"malformed": 1}


async def test_a_client_that_announces_too_long_a_message_is_disconnected_and_may_connect_again(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_module, "MAX_MESSAGE_BYTES", 1000)
    with serving(credentials) as server, connected(server.endpoint, credentials) as channel:
        with pytest.raises(ConnectionLostError):
            await channel.call(ping(1, released=["x" * 2000]))
        await channel.call(ping(2))


async def test_half_a_message_does_not_interrupt_the_work(credentials: Credentials) -> None:
    """A drafter continues with its passes until the rest of a request has arrived."""
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


def test_a_client_that_connects_again_replaces_its_earlier_connection(credentials: Credentials) -> None:
    """Half a message left over from the old connection is not read as part of the new one."""
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


async def test_an_exception_of_the_worker_ends_the_call_at_once(credentials: Credentials) -> None:
    """The group must not wait for the deadline before it starts all ranks again."""

    def answer(request: AnyRequest) -> AnyReply:
        raise TargetError("rank 0 was sent round 3 after round 1")

    server = make_server(credentials)
    with ThreadPoolExecutor(1) as thread, connected(server.endpoint, credentials) as channel:
        serving_ends = thread.submit(server.serve, answer)
        with pytest.raises(ConnectionLostError):
            await channel.call(ping(1, deadline_s=60))
        assert isinstance(await asyncio.to_thread(serving_ends.exception, 10), TargetError)


def test_a_server_that_was_closed_before_it_serves_returns_at_once(credentials: Credentials) -> None:
    server = make_server(credentials)
    server.close()
    server.serve(pong)
    assert not Path(server.endpoint.path).exists()
