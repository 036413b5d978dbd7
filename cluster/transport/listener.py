"""Listener: accepts the connections of a worker's one client, in a thread of its own.

A client on the same node connects to a Unix socket, in a folder that only this user may enter. A client on another
node, or one that has lost its connection, connects by TLS and must present the expected certificate. Unauthenticated
connections perform their handshakes side by side and within a time limit, so none of them delays the client.
"""

import itertools
import logging
import os
import queue
import selectors
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from cluster.transport.credentials import make_credentials, tls_context
from cluster.transport.endpoint import Endpoint, set_tcp_options
from engine.scratch import scratch_folder

if TYPE_CHECKING:
    import tempfile

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_MAX_UNAUTHENTICATED = 64
_PAUSE_AFTER_ERROR_S = 0.1


class Listener:
    """Accepts clients until closed; `fileno` becomes readable when a client is there or `wake` was called."""

    def __init__(self, host: str, node_id: str, client_certificate: str) -> None:
        credentials = make_credentials()
        self._tls = tls_context(credentials, client_certificate, is_server=True)
        folder = scratch_folder()
        self._folder: tempfile.TemporaryDirectory[str] | None = folder
        self._unix_socket = _listen_on_unix_socket(os.path.join(folder.name, "worker.sock"))
        self._tcp_socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        path = self._unix_socket.getsockname() if self._unix_socket is not None else ""
        self.endpoint = Endpoint(node_id, path, host, self._tcp_socket.getsockname()[1], credentials.certificate)
        self._unauthenticated: dict[ssl.SSLSocket, tuple[int, float]] = {}  # its number, and its deadline
        self._accepted: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)  # of connections, in the order in which they were opened
        self._newest = 0
        self._num_refused = 0
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._close_receiver, self._close_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for listening in filter(None, (self._unix_socket, self._tcp_socket)):
            listening.setblocking(False)  # a connection can be gone before it is accepted
            self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._close_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the file descriptor of the wake-up socket."""
        return self._wake_receiver.fileno()

    def wake(self) -> None:
        """Make `fileno` readable, which wakes the thread that waits for a client."""
        with suppress(BlockingIOError):  # it holds enough unread wake-ups
            self._wake_sender.send(b"!")

    def newest_client(self) -> socket.socket | None:
        """Return the client's newest connection, or None if there is no newer one; call when `fileno` is readable."""
        self._wake_receiver.recv(1)
        newest = None
        while not self._accepted.empty():
            number, client = self._accepted.get()
            if number > self._newest:
                if newest is not None:
                    newest.close()
                self._newest, newest = number, client
            else:
                client.close()  # its handshake took so long that the client has connected again since
        return newest

    def close(self) -> None:
        """Stop listening, and close every connection that was not taken."""
        self._close_sender.send(b"!")
        self._thread.join()
        while not self._accepted.empty():
            self._accepted.get()[1].close()
        pairs = (self._wake_receiver, self._wake_sender, self._close_receiver, self._close_sender)
        for open_socket in (self._tcp_socket, *pairs):
            open_socket.close()

    def _run(self) -> None:
        try:
            while not self._handle_events(self._selector.select(_HANDSHAKE_S if self._unauthenticated else None)):
                self._refuse_expired(time.monotonic())
        finally:
            for connection in self._unauthenticated:
                connection.close()
            self._remove_unix_socket()
            self._selector.close()

    def _handle_events(self, events: list[tuple[selectors.SelectorKey, int]]) -> bool:
        """Accept connections and continue handshakes; return whether `close` was called."""
        for key, _ in events:
            if key.fileobj is self._close_receiver:
                return True
            try:
                if key.fileobj is self._unix_socket:
                    self._hand_over(next(self._numbers), self._unix_socket.accept()[0])
                elif key.fileobj is self._tcp_socket:
                    self._begin_handshake(self._tcp_socket.accept()[0])
                elif key.fileobj in self._unauthenticated:  # an earlier event may have refused it
                    self._continue_handshake(key.fileobj)
            except BlockingIOError:
                continue
            except OSError as error:  # such as no file descriptor left
                logger.warning("Could not accept a connection: %s", error)
                time.sleep(_PAUSE_AFTER_ERROR_S)
        return False

    def _begin_handshake(self, connection: socket.socket) -> None:
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            self._refuse(next(iter(self._unauthenticated)), "too many newer connections are waiting")
        connection.setblocking(False)
        try:
            set_tcp_options(connection)
            # A handshake in wrap_socket would take a peer that has already left for an authenticated one.
            tls_connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            connection.close()
            self._log_refusal(str(error))
            return
        self._unauthenticated[tls_connection] = (next(self._numbers), time.monotonic() + _HANDSHAKE_S)
        self._selector.register(tls_connection, selectors.EVENT_READ)
        self._continue_handshake(tls_connection)

    def _continue_handshake(self, connection: ssl.SSLSocket) -> None:
        try:
            connection.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(connection, selectors.EVENT_WRITE)
        except OSError as error:  # includes TLS errors
            self._refuse(connection, str(error))
        else:
            self._selector.unregister(connection)
            number, _ = self._unauthenticated.pop(connection)
            self._hand_over(number, connection)

    def _hand_over(self, number: int, client: socket.socket) -> None:
        """Pass an authenticated connection to the thread that serves."""
        client.setblocking(False)
        self._accepted.put((number, client))
        self.wake()
        self._remove_unix_socket()

    def _remove_unix_socket(self) -> None:
        """Remove the Unix socket and its folder, which would stay behind for a while if the worker were killed."""
        if self._unix_socket is not None:
            self._selector.unregister(self._unix_socket)
            self._unix_socket.close()
            self._unix_socket = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _refuse_expired(self, now: float) -> None:
        for connection in [one for one, (_, deadline) in self._unauthenticated.items() if deadline <= now]:
            self._refuse(connection, f"no handshake within {_HANDSHAKE_S:g} s")

    def _refuse(self, connection: ssl.SSLSocket, reason: str) -> None:
        self._selector.unregister(connection)
        del self._unauthenticated[connection]
        connection.close()
        self._log_refusal(reason)

    def _log_refusal(self, reason: str) -> None:
        self._num_refused += 1
        # Only the first one is a warning, or a port scan would fill the log.
        level = logging.WARNING if self._num_refused == 1 else logging.DEBUG
        logger.log(level, "Refused connection %d: %s", self._num_refused, reason)


def _listen_on_unix_socket(path: str) -> socket.socket | None:
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        listening.listen()
    except OSError as error:  # such as a path longer than the system allows
        logger.warning("No Unix socket at %s, clients on this node connect by TLS: %s", path, error)
        listening.close()
        return None
    return listening
