"""Server: a worker's end of the connection to one client, a Router.

The thread that computes also waits on the socket. So a reply leaves as soon as it is computed, and a drafter can look
for the next request between two forward passes.

A client on the same node connects to a Unix socket, in a folder that only this user may enter. A client on another
node, or one that has lost its connection, connects by TLS and must present the expected certificate. Handshakes have
threads of their own and a time limit, so unauthenticated connections cannot delay the client.
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
_Answer = Callable[[AnyRequest], AnyReply | None]
_Work = Callable[[], bool]


class Server:
    """Answers the requests of one client one at a time, on its newest connection; the Router needs its `endpoint`."""

    def __init__(self, host: str, node_id: str, client_identity: str) -> None:
        """Listen for the client whose Connector has this identity; `serve` accepts its connections."""
        credentials = make_credentials()
        self._tls = tls_context(credentials, client_identity, is_server=True)
        self._folder = scratch_folder()
        self._unix_socket = _listen_on_unix_socket(os.path.join(self._folder.name, "worker.sock"))
        self._tcp_socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        path = self._unix_socket.getsockname() if self._unix_socket is not None else ""
        self.endpoint = Endpoint(node_id, path, host, self._tcp_socket.getsockname()[1], credentials.certificate)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._end_handshakes)
        self._selector.register(self._tcp_socket, selectors.EVENT_READ, self._accept_by_tls)
        if self._unix_socket is not None:
            self._selector.register(self._unix_socket, selectors.EVENT_READ, self._accept_neighbour)
        self._threads = ThreadPoolExecutor(_MAX_HANDSHAKES, "handshake")
        self._handshakes: dict[Future[None], tuple[int, ssl.SSLSocket]] = {}
        self._numbers = itertools.count(1)  # of connections, oldest first
        self._num_refused = 0
        self._client: socket.socket | None = None
        self._client_number = 0
        self._frames = FrameReader()
        self._payloads: deque[bytes] = deque()
        self._is_closing = threading.Event()

    def serve(self, answer: _Answer, work: _Work = lambda: False) -> None:
        """Answer requests in their order until `close` is called from another thread; an answer of None is not sent.

        `work` is called repeatedly while no request waits, for as long as it returns True. Malformed messages and late
        replies are dropped. An exception of `answer` or `work` ends serving and closes the connection, so the client
        learns of it at once.
        """
        is_working = False
        try:
            while not self._is_closing.is_set():
                if self._has_message(0 if is_working else None):
                    self._answer_one(answer)
                    is_working = True
                elif is_working:
                    is_working = work()
        finally:
            self.stop()

    def close(self) -> None:
        """Make `serve` return after the request it is answering; a later `serve` returns at once."""
        self._is_closing.set()
        self._wake()

    @property
    def selectable(self) -> int:
        """A file descriptor that is readable while `receive` has something to do, for a thread with several servers."""
        epoll: int = self._selector.fileno()
        return epoll

    def receive(self) -> list[AnyRequest]:
        """Accept and read what has arrived, without waiting, and return the requests in it."""
        requests = []
        while self._has_message(0):
            requests += self._next_request()
        return requests

    def send(self, reply: AnyReply) -> None:
        """Send a reply to the client; it is dropped if the client has left."""
        self._send(encode(reply))

    def _has_message(self, timeout_s: float | None) -> bool:
        """Return whether a whole message has arrived; wait at most `timeout_s` for events, or without limit if None."""
        if not self._payloads:
            for key, _ in self._selector.select(timeout_s):
                key.data()
        return bool(self._payloads)

    def _next_request(self) -> list[AnyRequest]:
        """Return the next message, if it is not malformed."""
        try:
            return [decode_request(self._payloads.popleft())]
        except MalformedMessageError as error:
            logger.debug("Dropped a message, malformed: %s", error)
            return []

    def _answer_one(self, answer: Callable[[AnyRequest], AnyReply | None]) -> None:
        started = time.monotonic()
        for request in self._next_request():
            reply = answer(request)
            seconds = time.monotonic() - started
            if seconds > request.deadline_s:
                logger.debug("Dropped a reply, overdue: %.3f s after its request of %g s", seconds, request.deadline_s)
            elif reply is not None:
                self.send(reply)

    def _send(self, payload: bytes) -> None:
        if self._client is None:
            return
        data = frame(payload)
        try:
            with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                data = data[self._client.send(data) :]
            if data:  # the rest did not fit into the socket's buffer
                self._client.settimeout(_SEND_S)
                self._client.sendall(data)
                self._client.setblocking(False)
        except OSError as error:
            self._drop_client(f"a reply could not be sent: {error}")

    def _read(self) -> None:
        """Read until a message is complete; the selector reports any bytes left over again."""
        if self._client is None:  # an earlier event dropped it
            return
        try:
            while data := self._client.recv(_READ_BYTES):
                self._payloads += self._frames.feed(data)
                if self._payloads:
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
        handshake = self._threads.submit(client.do_handshake)
        self._handshakes[handshake] = next(self._numbers), client
        handshake.add_done_callback(lambda _: self._wake())

    def _end_handshakes(self) -> None:
        self._wake_receiver.recv(1)
        for handshake in [handshake for handshake in self._handshakes if handshake.done()]:
            if (error := handshake.exception()) is not None:
                self._refuse(handshake, str(error))
            else:
                self._take_client(*self._handshakes.pop(handshake))

    def _refuse(self, handshake: Future[None], reason: str) -> None:
        _, connection = self._handshakes.pop(handshake)
        with suppress(OSError):  # the peer has left
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # which ends the handshake
        handshake.add_done_callback(lambda _: connection.close())
        self._log_refusal(reason)

    def _log_refusal(self, reason: str) -> None:
        self._num_refused += 1
        # Only the first one is a warning, or a port scan would fill the log.
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
        self._payloads.clear()

    def _remove_unix_socket(self) -> None:
        """Remove the Unix socket and its folder, which would stay behind for a while if the worker were killed."""
        if self._unix_socket is not None:
            self._selector.unregister(self._unix_socket)
            self._unix_socket.close()
            self._unix_socket = None
        self._folder.cleanup()

    def _wake(self) -> None:
        with suppress(OSError):  # it holds enough unread wake-ups, or `serve` has ended
            self._wake_sender.send(b"!")

    def stop(self) -> None:
        """Close all sockets; for the thread that receives, where that is not `serve`."""
        self._drop_client("the server stops")
        self._remove_unix_socket()
        for handshake in list(self._handshakes):
            self._refuse(handshake, "the server stops")
        self._threads.shutdown()
        self._selector.close()
        for open_socket in (self._tcp_socket, self._wake_receiver, self._wake_sender):
            open_socket.close()


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
