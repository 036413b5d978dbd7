"""The worker's end: which connections it accepts, what it answers and drops, and how it ends."""

import asyncio
import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.protocol.messages import AnyReply, AnyRequest, encode
from cluster.transport import ConnectionLostError, Listener, Server
from cluster.transport import server as server_module
from cluster.transport.credentials import Credentials, tls_context
from cluster.transport.frames import frame
from engine.errors import TargetError
from tests.cluster.wire import NODE_ID, in_thread, linked, ping, pong, serving
from tests.waiting import wait_until

RESET = struct.pack("ii", 1, 0)  # linger for 0 s: closing sends a reset


@pytest.fixture
def server(credentials: Credentials) -> Iterator[Listener]:
    with serving(credentials.certificate) as server:
        yield server


def connect_by_tcp(server: Listener) -> socket.socket:
    return socket.create_connection((server.endpoint.host, server.endpoint.port), 10)


def connect_by_tls(server: Listener, credentials: Credentials) -> socket.socket:
    return tls_context(credentials, server.endpoint.certificate, is_server=False).wrap_socket(connect_by_tcp(server))


def assert_answers(connection: socket.socket, number: int = 1) -> None:
    connection.sendall(frame(encode(ping(number))))
    assert connection.recv(1000) == frame(encode(pong(ping(number))))


def test_a_malformed_message_is_dropped(server, credentials):
    with connect_by_tls(server, credentials) as client:
        client.sendall(frame(b"\xc1 no message"))
        assert_answers(client)


async def test_half_a_message_does_not_interrupt_the_work(credentials):
    """A drafter continues with its passes until the rest of a request has arrived."""
    num_passes = 0
    has_worked = threading.Event()

    def work() -> bool:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 100:
            has_worked.set()
        return True

    with serving(credentials.certificate, work=work) as server, socket.socket(socket.AF_UNIX) as client:
        client.connect(server.endpoint.path)
        first, second = (frame(encode(ping(number))) for number in (1, 2))
        client.sendall(first + second[:-1])
        assert client.recv(1000) == frame(encode(pong(ping(1))))
        assert has_worked.wait(10)
        client.sendall(second[-1:])
        assert client.recv(1000) == frame(encode(pong(ping(2))))


def test_a_client_without_tls_is_refused(server):
    with connect_by_tcp(server) as plain:
        plain.sendall(frame(encode(ping(1))))
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(1000):
                pass
    wait_until(lambda: server._num_refused == 1)


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_client_that_leaves_before_its_handshake_is_not_accepted(credentials, how):
    """On a socket without a peer, wrap_socket itself does no handshake and raises nothing."""
    serving = Server("127.0.0.1", NODE_ID)
    server = serving.listen(credentials.certificate, pong)
    with connect_by_tcp(server) as client:
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.sendall(frame(encode(ping(1))))
    with in_thread(serving):
        wait_until(lambda: server._num_refused == 1)
        assert server._client is None


def test_slow_handshakes_do_not_delay_the_client(server, credentials, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_HANDSHAKES", 10)
    monkeypatch.setattr(server_module, "_HANDSHAKE_S", 60)
    with contextlib.ExitStack() as slow:
        connections = [slow.enter_context(connect_by_tcp(server)) for _ in range(25)]
        with connect_by_tls(server, credentials) as client:
            assert_answers(client)
        assert connections[0].recv(1) == b""  # the oldest ones made room
        wait_until(lambda: server._num_refused == 16)


def test_a_handshake_that_began_earlier_does_not_replace_a_later_client(server, credentials):
    with connect_by_tcp(server) as slow:
        wait_until(lambda: server._handshakes)
        with connect_by_tls(server, credentials) as later:
            assert_answers(later)
            context = tls_context(credentials, server.endpoint.certificate, is_server=False)
            with context.wrap_socket(slow) as finished:
                assert finished.recv(1) == b""
            assert_answers(later)


def test_a_lack_of_file_descriptors_does_not_end_the_server(server, credentials, monkeypatch):
    failures = [OSError(24, "Too many open files")] * 3
    accept = socket.socket.accept

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with connect_by_tls(server, credentials) as client:
        assert_answers(client)


@pytest.mark.parametrize("by", ["unix socket", "tls"])
def test_the_folder_is_removed_once_a_client_is_accepted(server, credentials, by):
    """Workers are killed, so they cannot remove it at their end."""
    folder = Path(server.endpoint.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) if by == "unix socket" else connect_by_tls(server, credentials) as client:
        if by == "unix socket":
            client.connect(server.endpoint.path)
        wait_until(lambda: not folder.exists())


def test_with_too_long_a_path_clients_connect_by_tls(credentials, monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with serving(credentials.certificate) as server:
        monkeypatch.undo()
        assert server.endpoint.path == ""
        with connect_by_tls(server, credentials) as client:
            assert_answers(client)


async def test_an_exception_of_the_worker_ends_the_call_at_once(credentials):
    """The group must not wait for the deadline before it starts all ranks again."""

    def answer(request: AnyRequest) -> AnyReply:
        raise TargetError("rank 0 was sent round 3 after round 1")

    server = Server("127.0.0.1", NODE_ID)
    listener = server.listen(credentials.certificate, answer)
    with ThreadPoolExecutor(1) as thread, linked(listener.endpoint, credentials) as link:
        serving_ends = thread.submit(server.serve)
        with pytest.raises(ConnectionLostError):
            await link.call(ping(1, deadline_s=60))
        assert isinstance(await asyncio.to_thread(serving_ends.exception, 10), TargetError)


def test_a_client_that_connects_again_replaces_its_earlier_connection(server, credentials):
    """Half a message left over from the old connection is not read as part of the new one."""
    with connect_by_tls(server, credentials) as old:
        assert_answers(old)
        old.sendall(frame(encode(ping(2)))[:-1])
        with connect_by_tls(server, credentials) as new:
            assert_answers(new, 3)
            assert old.recv(1000) == b""


def test_a_handshake_that_takes_too_long_is_refused(server, monkeypatch):
    monkeypatch.setattr(server_module, "_HANDSHAKE_S", 0.1)
    with connect_by_tcp(server) as connection:
        assert connection.recv(1) == b""
