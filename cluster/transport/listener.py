"""Doors: where a worker's one client comes in, in a thread of their own.

A client on the same node comes through a Unix socket, in a folder that only this user may enter. One from elsewhere, or
one that has lost its connection, comes by TLS and shows the one certificate that is let in. Strangers shake hands side
by side and for a limited time, so none of them keeps the client waiting.
"""

import itertools
import logging
import os
import queue
import selectors
import socket
import ssl
import tempfile
import threading
import time
from contextlib import suppress

from cluster.transport.credentials import make_credentials, tls_context
from cluster.transport.endpoint import Endpoint, tune

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_MAX_STRANGERS = 64
_PAUSE_S = 0.1


class Doors:
    """Lets clients in until closed; `fileno` is readable when one has come in, or `ring` was called."""

    def __init__(self, host: str, client_certificate: str) -> None:
        self.num_refused = 0
        own = make_credentials()
        self._tls = tls_context(own, client_certificate, is_server=True)
        folder = tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True)
        self._folder: tempfile.TemporaryDirectory[str] | None = folder
        self._near = _listen_near(os.path.join(folder.name, "worker.sock"))
        self._far = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        path = self._near.getsockname() if self._near is not None else ""
        self.endpoint = Endpoint(path, host, self._far.getsockname()[1], own.certificate)
        self._strangers: dict[ssl.SSLSocket, tuple[int, float]] = {}
        self._arrivals: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._newest = 0
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)
        self._exit, self._exit_button = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for door in filter(None, (self._near, self._far)):
            door.setblocking(False)  # who has come may be gone before it is asked in
            self._selector.register(door, selectors.EVENT_READ)
        self._selector.register(self._exit, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._keep, name="doors", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._bell.fileno()

    def ring(self) -> None:
        """Wake whoever waits for a client."""
        with suppress(BlockingIOError):  # it has rung often enough
            self._button.send(b"!")

    def take(self) -> socket.socket | None:
        """Return the client that came in last, unless it is one that was there before; the bell has rung for it."""
        self._bell.recv(1)
        newest = None
        while not self._arrivals.empty():
            number, client = self._arrivals.get()
            if number > self._newest:
                if newest is not None:
                    newest.close()
                self._newest, newest = number, client
            else:
                client.close()  # it was slow to shake hands, and has come again since
        return newest

    def close(self) -> None:
        """Let nobody in any more."""
        self._exit_button.send(b"!")
        self._thread.join()
        while not self._arrivals.empty():
            self._arrivals.get()[1].close()
        for own in (self._far, self._bell, self._button, self._exit, self._exit_button):
            own.close()

    def _keep(self) -> None:
        try:
            while not self._serve_events(self._selector.select(_HANDSHAKE_S if self._strangers else None)):
                self._send_away(late=time.monotonic())
        finally:
            for stranger in self._strangers:
                stranger.close()
            self._shut_near()
            self._selector.close()

    def _serve_events(self, events: list[tuple[selectors.SelectorKey, int]]) -> bool:
        """Do what is to be done at each door; return whether to leave."""
        for key, _ in events:
            if key.fileobj is self._exit:
                return True
            try:
                if key.fileobj is self._near:
                    self._let_in(next(self._numbers), self._near.accept()[0])
                elif key.fileobj is self._far:
                    self._meet(self._far.accept()[0])
                elif key.fileobj in self._strangers:  # an earlier event may have sent it away
                    self._shake_hands(key.fileobj)
            except BlockingIOError:
                continue
            except OSError as error:  # such as no descriptor left
                logger.warning("Could not let a client in: %s", error)
                time.sleep(_PAUSE_S)
        return False

    def _meet(self, connection: socket.socket) -> None:
        if len(self._strangers) >= _MAX_STRANGERS:
            self._refuse(next(iter(self._strangers)), "others have come since")
        connection.setblocking(False)
        try:
            tune(connection)
            # Else one that has gone already would be taken for one that has shaken hands.
            stranger = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            connection.close()
            self._count_refused(str(error))
            return
        self._strangers[stranger] = (next(self._numbers), time.monotonic() + _HANDSHAKE_S)
        self._selector.register(stranger, selectors.EVENT_READ)
        self._shake_hands(stranger)

    def _shake_hands(self, stranger: ssl.SSLSocket) -> None:
        try:
            stranger.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(stranger, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(stranger, selectors.EVENT_WRITE)
        except OSError as error:  # of TLS too
            self._refuse(stranger, str(error))
        else:
            self._selector.unregister(stranger)
            number, _ = self._strangers.pop(stranger)
            self._let_in(number, stranger)

    def _let_in(self, number: int, client: socket.socket) -> None:
        client.setblocking(False)
        self._arrivals.put((number, client))
        self.ring()
        self._shut_near()

    def _shut_near(self) -> None:
        """Remove the Unix socket once the client is in: a worker that is killed would leave its folder behind."""
        if self._near is not None:
            self._selector.unregister(self._near)
            self._near.close()
            self._near = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _send_away(self, *, late: float) -> None:
        for stranger in [one for one, (_, deadline) in self._strangers.items() if deadline <= late]:
            self._refuse(stranger, f"no handshake within {_HANDSHAKE_S:g} s")

    def _refuse(self, stranger: ssl.SSLSocket, reason: str) -> None:
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        stranger.close()
        self._count_refused(reason)

    def _count_refused(self, reason: str) -> None:
        self.num_refused += 1
        # Whoever scans ports shall not fill the log.
        level = logging.WARNING if self.num_refused == 1 else logging.DEBUG
        logger.log(level, "Refused a connection, the %d. so far: %s", self.num_refused, reason)


def _listen_near(path: str) -> socket.socket | None:
    near = socket.socket(socket.AF_UNIX)
    try:
        near.bind(path)
        near.listen()
    except OSError as error:  # a longer path than sockets may have
        logger.warning("No Unix socket at %s, clients on this node come by TLS: %s", path, error)
        near.close()
        return None
    return near
