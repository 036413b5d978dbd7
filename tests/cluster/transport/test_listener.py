"""Who is let in, who keeps whom waiting, and what is left behind."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector, SelectorKey

import pytest

from cluster.protocol.messages import encode
from cluster.transport import listener as doors_module
from cluster.transport.credentials import Credentials, make_credentials, tls_context
from cluster.transport.frames import frame
from cluster.transport.listener import Doors
from tests.cluster.wire import ping

_RESET = struct.pack("ii", 1, 0)  # linger for 0 s: closing sends a reset


@pytest.fixture
def credentials() -> Credentials:
    return make_credentials()


@pytest.fixture
def doors(credentials: Credentials) -> Iterator[Doors]:
    with contextlib.closing(Doors("127.0.0.1", credentials.certificate)) as doors:
        yield doors


def arrived(doors: Doors) -> socket.socket | None:
    """Return who comes in within some seconds."""
    with DefaultSelector() as selector:
        selector.register(doors, EVENT_READ)
        assert selector.select(10)
        return doors.take()


def knock(doors: Doors) -> socket.socket:
    return socket.create_connection((doors.endpoint.host, doors.endpoint.port), 10)


def come_from_afar(doors: Doors, credentials: Credentials) -> socket.socket:
    return tls_context(credentials, doors.endpoint.certificate, is_server=False).wrap_socket(knock(doors))


def wait_for(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        doors_module.time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_both_doors_lead_in(doors: Doors, credentials: Credentials) -> None:
    with socket.socket(socket.AF_UNIX) as near:
        near.connect(doors.endpoint.path)
        client = arrived(doors)
        assert client is not None
        with client:
            near.send(b"near")
            wait_for(lambda: client.recv(4, socket.MSG_PEEK))
            assert client.recv(4) == b"near"
    with come_from_afar(doors, credentials) as far:
        client = arrived(doors)
        assert client is not None
        with client:
            client.setblocking(True)
            far.send(b"far")
            assert client.recv(3) == b"far"


def test_a_plain_client_is_refused(doors: Doors) -> None:
    with knock(doors) as plain:
        plain.sendall(frame(encode(ping(1))))
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(1000):
                pass
    wait_for(lambda: doors.num_refused == 1)


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_who_has_gone_before_it_was_met_is_not_let_in(doors: Doors, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """On a socket without a peer, wrap_socket itself shakes no hands and raises nothing."""
    met, meet = [], Doors._meet

    def meet_late(own: Doors, connection: socket.socket) -> None:
        visitor = visitors.pop()
        if how == "reset":
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        visitor.sendall(frame(encode(ping(1))))
        visitor.close()
        meet(own, connection)
        met.append(connection)

    monkeypatch.setattr(Doors, "_meet", meet_late)
    visitors = [socket.socket()]
    visitors[0].connect((doors.endpoint.host, doors.endpoint.port))
    wait_for(lambda: met and doors.num_refused == 1)
    assert doors._arrivals.empty()


def test_who_is_slow_at_the_door_keeps_nobody_waiting(
    doors: Doors, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors_module, "_MAX_STRANGERS", 10)
    with contextlib.ExitStack() as slow:
        strangers = [slow.enter_context(knock(doors)) for _ in range(25)]
        with come_from_afar(doors, credentials):
            client = arrived(doors)
            assert client is not None
            client.close()
        assert strangers[0].recv(1) == b""  # the first ones had to make room
        wait_for(lambda: doors.num_refused == 16)


def test_who_leaves_in_the_moment_he_is_sent_away_takes_nobody_with_him(
    doors: Doors, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors_module, "_MAX_STRANGERS", 2)
    select = doors._selector.select

    def select_late(timeout: float | None) -> list[tuple[SelectorKey, int]]:
        select(timeout)
        doors_module.time.sleep(0.2)  # until several events are there at once
        return sorted(select(timeout), key=lambda event: event[0].fileobj is not doors._far)

    monkeypatch.setattr(doors._selector, "select", select_late)
    with knock(doors) as first, knock(doors):
        wait_for(lambda: len(doors._strangers) == 2)
        with knock(doors):
            first.close()
            wait_for(lambda: doors.num_refused)
    with come_from_afar(doors, credentials):
        client = arrived(doors)
        assert client is not None
        client.close()


def test_who_does_not_shake_hands_in_time_is_sent_away(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors_module, "_HANDSHAKE_S", 0.1)
    with knock(doors) as stranger:
        assert stranger.recv(1) == b""


def test_a_handshake_that_began_earlier_does_not_replace_a_later_client(doors: Doors, credentials: Credentials) -> None:
    with knock(doors) as slow:
        wait_for(lambda: doors._strangers)
        with come_from_afar(doors, credentials) as later:
            client = arrived(doors)
            assert client is not None
            context = tls_context(credentials, doors.endpoint.certificate, is_server=False)
            with context.wrap_socket(slow) as finished:
                assert arrived(doors) is None
                assert finished.recv(1) == b""
            client.setblocking(True)
            later.send(b"!")
            assert client.recv(1) == b"!"
            client.close()


def test_no_descriptor_left_is_no_reason_to_close(
    doors: Doors, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(24, "Too many open files")] * 3
    accept = socket.socket.accept

    def failing(own: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(own)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with come_from_afar(doors, credentials):
        client = arrived(doors)
        assert client is not None
        client.close()


@pytest.mark.parametrize("place", ["near", "afar"])
def test_the_folder_is_gone_once_the_client_is_in(doors: Doors, credentials: Credentials, place: str) -> None:
    """Workers are killed, not stopped: what they leave in the file system stays."""
    folder = Path(doors.endpoint.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) if place == "near" else come_from_afar(doors, credentials) as client:
        if place == "near":
            client.connect(doors.endpoint.path)
        wait_for(lambda: not folder.exists())


def test_too_long_a_path_leaves_the_other_door(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    os.mkdir(long)
    monkeypatch.setattr(doors_module.tempfile, "tempdir", str(long))
    with contextlib.closing(Doors("127.0.0.1", credentials.certificate)) as doors:
        monkeypatch.undo()
        assert doors.endpoint.path == ""
        with come_from_afar(doors, credentials):
            client = arrived(doors)
            assert client is not None
            client.close()


def test_closing_ends_the_thread_whoever_is_at_the_door(credentials: Credentials) -> None:
    doors = Doors("127.0.0.1", credentials.certificate)
    with knock(doors):
        wait_for(lambda: doors._strangers)
        doors.close()
        assert not doors._thread.is_alive()
