"""Server: a worker's end of the connections to its clients, which are Routers or other workers.

A client on the same node connects to a Unix socket that only this user can reach. On another node, or after a lost
connection, it connects by TLS with the expected certificate. Handshakes run in threads of their own, with a time limit,
so unauthenticated connections cannot delay the client.
"""

import itertools
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from cluster.protocol.messages import AnyReply, AnyRequest, MalformedMessageError, decode_request, encode
from cluster.transport.credentials import make_credentials, tls_context
from cluster.transport.frames import FrameReader, frame, set_options
from cluster.transport.link import Endpoint
from engine.execution.scratch import scratch_folder

logger = logging.getLogger(__name__)

_READ_BYTES = 2**18
_SEND_S = 10.0
_HANDSHAKE_S = 5.0
_MAX_HANDSHAKES = 64
_PAUSE_AFTER_ERROR_S = 0.01


Answer = Callable[[AnyRequest], AnyReply | None]
"""Returns the reply to a client's request; None if there is none, or it is sent later."""


class Listener:
    """The sockets for one client, which connects to `endpoint`; only the thread that serves calls its methods."""

    def __init__(self, server: "Server", client_identity: str, answer: Answer) -> None:
        credentials = make_credentials()
        self.answer, self._server, host = answer, server, server.host
        self._tls = tls_context(credentials, client_identity, is_server=True)
        self._folder = scratch_folder()
        self._unix_socket = _listen_on_unix_socket(os.path.join(self._folder.name, "worker.sock"))
        self._tcp_socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        path = self._unix_socket.getsockname() if self._unix_socket is not None else ""
        port = self._tcp_socket.getsockname()[1]
        self.endpoint = Endpoint(server.node_id, path, host, port, credentials.certificate)
        self._handshakes: dict[Future[None], tuple[int, ssl.SSLSocket]] = {}
        self._numbers = itertools.count(1)  # of connections, oldest first
        self._num_refused = 0
        self._client: socket.socket | None = None
        self._client_number = 0
        self._frames = FrameReader()
        self._selector = server.selector
        self._selector.register(self._tcp_socket, selectors.EVENT_READ, self._accept_by_tls)
        if self._unix_socket is not None:
            self._selector.register(self._unix_socket, selectors.EVENT_READ, self._accept_neighbour)

    def send(self, reply: AnyReply) -> None:
        if self._client is None:
            return
        data = frame(encode(reply))
        try:
            with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                data = data[self._client.send(data) :]
            if data:  # the rest did not fit into the socket's buffer
                self._client.settimeout(_SEND_S)
                self._client.sendall(data)
                self._client.setblocking(False)
        except OSError as error:
            self._drop_client(f"a reply could not be sent: {error}")

    def end_handshakes(self) -> None:
        """Accept the client if it has proved itself, and close connections whose handshake failed."""
        for handshake in [handshake for handshake in self._handshakes if handshake.done()]:
            if (error := handshake.exception()) is not None:
                self._refuse(handshake, str(error))
            else:
                self._take_client(*self._handshakes.pop(handshake))

    def close(self, reason: str) -> None:
        self._drop_client(reason)
        self._remove_unix_socket()
        for handshake in list(self._handshakes):
            self._refuse(handshake, reason)
        self._selector.unregister(self._tcp_socket)
        self._tcp_socket.close()

    def _read(self) -> None:
        """Read until a message is complete; the selector reports any bytes left over again."""
        if self._client is None:  # an earlier event dropped it
            return
        try:
            while data := self._client.recv(_READ_BYTES):
                if payloads := self._frames.feed(data):
                    self._server.payloads += [(self, payload) for payload in payloads]
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (MalformedMessageError, OSError) as error:
            self._drop_client(str(error))
        else:
            self._drop_client("it closed the connection")

    def _accept_neighbour(self) -> None:
        assert self._unix_socket is not None
        self._take_client(next(self._numbers), self._unix_socket.accept()[0])

    def _accept_by_tls(self) -> None:
        """Begin a handshake; if too many are under way, the oldest makes room."""
        try:
            connection = self._tcp_socket.accept()[0]
            connection.settimeout(_HANDSHAKE_S)
            # A handshake in wrap_socket would take a peer that has already left for an authenticated one.
            client = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError as error:  # such as no file descriptor left
            self._log_refusal(str(error))
            time.sleep(_PAUSE_AFTER_ERROR_S)
            return
        if len(self._handshakes) == _MAX_HANDSHAKES:
            self._refuse(next(iter(self._handshakes)), "too many newer connections are waiting")
        handshake = self._server.threads.submit(client.do_handshake)
        self._handshakes[handshake] = next(self._numbers), client
        handshake.add_done_callback(lambda _: self._server.wake())

    def _refuse(self, handshake: Future[None], reason: str) -> None:
        _, connection = self._handshakes.pop(handshake)
        with suppress(OSError):  # the peer has left
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # which ends the handshake
        handshake.add_done_callback(lambda _: connection.close())
        self._log_refusal(reason)

    def _log_refusal(self, reason: str) -> None:
        self._num_refused += 1
        # Only the first refusal is a warning, or a port scan would fill the log.
        level = logging.WARNING if self._num_refused == 1 else logging.DEBUG
        logger.log(level, "Refused connection %d: %s", self._num_refused, reason)

    def _take_client(self, number: int, client: socket.socket) -> None:
        self._remove_unix_socket()
        if number < self._client_number:
            client.close()  # its handshake took so long that the client has connected again since
            return
        self._drop_client("it has connected again")
        client.setblocking(False)
        set_options(client)
        self._client, self._client_number = client, number
        self._selector.register(client, selectors.EVENT_READ, self._read)

    def _drop_client(self, reason: str) -> None:
        if self._client is None:
            return
        logger.debug("Closed the client's connection: %s", reason)
        self._selector.unregister(self._client)
        self._client.close()
        self._client = None
        self._frames = FrameReader()

    def _remove_unix_socket(self) -> None:
        """Remove the Unix socket and its folder early, because a killed worker leaves them behind for a while."""
        if self._unix_socket is not None:
            self._selector.unregister(self._unix_socket)
            self._unix_socket.close()
            self._unix_socket = None
        self._folder.cleanup()


class Server:
    """Answers the requests of its clients one at a time, in the thread that calls `serve`.

    That thread also waits on the sockets, so a drafter can look for the next request between two forward passes.
    """

    def __init__(self, host: str, node_id: str) -> None:
        self.host, self.node_id = host, node_id
        self.selector = selectors.DefaultSelector()  # a key's data is called when its socket is ready
        self.threads = ThreadPoolExecutor(_MAX_HANDSHAKES, "handshake")
        self.payloads: deque[tuple[Listener, bytes]] = deque()  # messages that are not answered yet
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self.selector.register(self._wake_receiver, selectors.EVENT_READ, self._end_handshakes)
        self._listeners: list[Listener] = []
        self._is_closing = threading.Event()

    def listen(self, client_identity: str, answer: Answer) -> Listener:
        """Accept the client whose Connector has this identity, and answer its requests; callable from any thread."""
        listener = Listener(self, client_identity, answer)
        self._listeners.append(listener)
        return listener

    def forget(self, listener: Listener) -> None:
        """Close a client's sockets; only in the thread that serves."""
        self._listeners.remove(listener)
        self.payloads = deque(entry for entry in self.payloads if entry[0] is not listener)
        listener.close("it is not served any more")

    def serve(self, work: Callable[[], bool] = lambda: False) -> None:
        """Answer requests in their order until `close` is called from another thread.

        While no request waits, `work` is called after each event, and again for as long as it returns True. Malformed
        messages and late replies are dropped. Other exceptions end serving and close the connections.
        """
        is_working = False
        try:
            while not self._is_closing.is_set():
                if not self.payloads:
                    for key, _ in self.selector.select(0 if is_working else None):
                        key.data()
                if self.payloads:
                    self._answer_one(*self.payloads.popleft())
                    is_working = True
                else:
                    is_working = work()
        finally:
            self._stop()

    def close(self) -> None:
        """Make `serve` return after the request it is answering; a later `serve` returns at once."""
        self._is_closing.set()
        self.wake()

    def wake(self) -> None:
        """Have the thread that serves call `work`."""
        with suppress(OSError):  # it has unread wake-ups, or `serve` has ended
            self._wake_sender.send(b"!")

    def _answer_one(self, listener: Listener, payload: bytes) -> None:
        started = time.monotonic()
        try:
            request = decode_request(payload)
        except MalformedMessageError as error:
            logger.debug("Dropped a message, malformed: %s", error)
            return
        reply = listener.answer(request)
        seconds = time.monotonic() - started
        if seconds > request.deadline_s:
            logger.debug("Dropped a reply, overdue: %.3f s after its request of %g s", seconds, request.deadline_s)
        elif reply is not None:
            listener.send(reply)

    def _end_handshakes(self) -> None:
        self._wake_receiver.recv(1)
        for listener in self._listeners:
            listener.end_handshakes()

    def _stop(self) -> None:
        for listener in self._listeners:
            listener.close("the server stops")
        self.threads.shutdown()
        self.selector.close()
        for end in (self._wake_receiver, self._wake_sender):
            end.close()


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
