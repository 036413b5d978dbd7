"""Which connections are accepted, which delay which, and what is left on disk."""

import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector, SelectorKey

import pytest

from cluster.protocol.messages import encode
from cluster.transport import listener as listener_module
from cluster.transport.credentials import Credentials, make_credentials, tls_context
from cluster.transport.frames import frame
from cluster.transport.listener import Listener
from tests.cluster.wire import NODE_ID, ping

_RESET = struct.pack("ii", 1, 0)  # linger for 0 s: closing sends a reset


@pytest.fixture
def credentials() -> Credentials:
    return make_credentials()


@pytest.fixture
def listener(credentials: Credentials) -> Iterator[Listener]:
    with contextlib.closing(Listener("127.0.0.1", NODE_ID, credentials.certificate)) as listener:
        yield listener


def newest_client(listener: Listener) -> socket.socket | None:
    """Return the connection that is accepted within some seconds."""
    with DefaultSelector() as selector:
        selector.register(listener, EVENT_READ)
        assert selector.select(10)
        return listener.newest_client()


def connect_by_tcp(listener: Listener) -> socket.socket:
    return socket.create_connection((listener.endpoint.host, listener.endpoint.port), 10)


def connect_by_tls(listener: Listener, credentials: Credentials) -> socket.socket:
    return tls_context(credentials, listener.endpoint.certificate, is_server=False).wrap_socket(
        connect_by_tcp(listener)
    )


def wait_for(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        listener_module.time.sleep(0.01)
    raise AssertionError("the condition did not become true")


def test_clients_connect_by_unix_socket_and_by_tls(listener: Listener, credentials: Credentials) -> None:
    with socket.socket(socket.AF_UNIX) as unix_client:
        unix_client.connect(listener.endpoint.path)
        client = newest_client(listener)
        assert client is not None
        with client:
            unix_client.send(b"near")
            wait_for(lambda: client.recv(4, socket.MSG_PEEK))
            assert client.recv(4) == b"near"
    with connect_by_tls(listener, credentials) as tls_client:
        client = newest_client(listener)
        assert client is not None
        with client:
            client.setblocking(True)
            tls_client.send(b"far")
            assert client.recv(3) == b"far"


def test_a_client_without_tls_is_refused(listener: Listener) -> None:
    with connect_by_tcp(listener) as plain:
        plain.sendall(frame(encode(ping(1))))
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(1000):
                pass
    wait_for(lambda: listener._num_refused == 1)


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_client_that_leaves_before_its_handshake_is_not_accepted(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """On a socket without a peer, wrap_socket itself does no handshake and raises nothing."""
    handled, begin_handshake = [], Listener._begin_handshake

    def begin_handshake_late(self: Listener, connection: socket.socket) -> None:
        client = clients.pop()
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.sendall(frame(encode(ping(1))))
        client.close()
        begin_handshake(self, connection)
        handled.append(connection)

    monkeypatch.setattr(Listener, "_begin_handshake", begin_handshake_late)
    clients = [socket.socket()]
    clients[0].connect((listener.endpoint.host, listener.endpoint.port))
    wait_for(lambda: handled and listener._num_refused == 1)
    assert listener._accepted.empty()


def test_slow_handshakes_do_not_delay_the_client(
    listener: Listener, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_MAX_UNAUTHENTICATED", 10)
    with contextlib.ExitStack() as slow:
        connections = [slow.enter_context(connect_by_tcp(listener)) for _ in range(25)]
        with connect_by_tls(listener, credentials):
            client = newest_client(listener)
            assert client is not None
            client.close()
        assert connections[0].recv(1) == b""  # the oldest ones made room
        wait_for(lambda: listener._num_refused == 16)


def test_a_connection_that_closes_while_it_is_refused_does_not_end_the_listener(
    listener: Listener, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_MAX_UNAUTHENTICATED", 2)
    select = listener._selector.select

    def select_late(timeout: float | None) -> list[tuple[SelectorKey, int]]:
        select(timeout)
        listener_module.time.sleep(0.2)  # until several events are there at once
        return sorted(select(timeout), key=lambda event: event[0].fileobj is not listener._tcp_socket)

    monkeypatch.setattr(listener._selector, "select", select_late)
    with connect_by_tcp(listener) as first, connect_by_tcp(listener):
        wait_for(lambda: len(listener._unauthenticated) == 2)
        with connect_by_tcp(listener):
            first.close()
            wait_for(lambda: listener._num_refused)
    with connect_by_tls(listener, credentials):
        client = newest_client(listener)
        assert client is not None
        client.close()


def test_a_handshake_that_takes_too_long_is_refused(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_HANDSHAKE_S", 0.1)
    with connect_by_tcp(listener) as connection:
        assert connection.recv(1) == b""


def test_a_handshake_that_began_earlier_does_not_replace_a_later_client(
    listener: Listener, credentials: Credentials
) -> None:
    with connect_by_tcp(listener) as slow:
        wait_for(lambda: listener._unauthenticated)
        with connect_by_tls(listener, credentials) as later:
            client = newest_client(listener)
            assert client is not None
            context = tls_context(credentials, listener.endpoint.certificate, is_server=False)
            with context.wrap_socket(slow) as finished:
                assert newest_client(listener) is None
                assert finished.recv(1) == b""
            client.setblocking(True)
            later.send(b"!")
            assert client.recv(1) == b"!"
            client.close()


def test_a_lack_of_file_descriptors_does_not_end_the_listener(
    listener: Listener, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(24, "Too many open files")] * 3
    accept = socket.socket.accept

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with connect_by_tls(listener, credentials):
        client = newest_client(listener)
        assert client is not None
        client.close()


@pytest.mark.parametrize("by", ["unix socket", "tls"])
def test_the_folder_is_removed_once_a_client_is_accepted(listener: Listener, credentials: Credentials, by: str) -> None:
    """Workers are killed, so they cannot remove it at their end."""
    folder = Path(listener.endpoint.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) if by == "unix socket" else connect_by_tls(listener, credentials) as client:
        if by == "unix socket":
            client.connect(listener.endpoint.path)
        wait_for(lambda: not folder.exists())


def test_with_too_long_a_path_clients_connect_by_tls(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    os.mkdir(long)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with contextlib.closing(Listener("127.0.0.1", NODE_ID, credentials.certificate)) as listener:
        monkeypatch.undo()
        assert listener.endpoint.path == ""
        with connect_by_tls(listener, credentials):
            client = newest_client(listener)
            assert client is not None
            client.close()


def test_closing_ends_the_thread_during_a_handshake(credentials: Credentials) -> None:
    listener = Listener("127.0.0.1", NODE_ID, credentials.certificate)
    with connect_by_tcp(listener):
        wait_for(lambda: listener._unauthenticated)
        listener.close()
        assert not listener._thread.is_alive()
