"""SocketServer: a worker's end of the connection.

The thread that computes also waits on the socket. So a reply leaves as soon as it is computed, and a drafter can look
for the next request between two forward passes.
"""

import logging
import selectors
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from cluster.protocol.messages import MalformedMessageError, decode_request, encode
from cluster.transport.frames import FrameReader, frame
from cluster.transport.listener import Listener
from cluster.transport.protocol import Answer, Server

if TYPE_CHECKING:
    import socket

logger = logging.getLogger(__name__)

_READ_BYTES = 2**18
_SEND_S = 10.0


def listen(host: str, *, node_id: str, client_identity: str) -> Server:
    """Return a server that accepts connections from one client.

    Args:
        host: the address of this node to listen on.
        node_id: Ray's id of this node.
        client_identity: the `identity` of the client's Connector.
    """
    return SocketServer(host, node_id, client_identity)


class SocketServer:
    """Serves its client's newest connection: when the client connects again, the older connection is closed."""

    def __init__(self, host: str, node_id: str, client_certificate: str) -> None:
        self._is_closing = threading.Event()
        self._listener = Listener(host, node_id, client_certificate)
        self.endpoint = self._listener.endpoint
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._client: socket.socket | None = None
        self._frames = FrameReader()
        self._payloads: deque[bytes] = deque()

    def serve(self, answer: Answer, work: Callable[[], bool] = lambda: False) -> None:
        """Answer requests in their order until `close` is called; see `Server.serve`."""
        is_working = False
        try:
            while not self._is_closing.is_set():
                if self._has_message(0 if is_working else None):
                    self._answer_one(answer)
                    is_working = True
                elif is_working:
                    is_working = work()
        finally:
            self._drop_client("the server stops")
            self._listener.close()
            self._selector.close()

    def close(self) -> None:
        """Make `serve` return after the request it is answering; a later `serve` returns at once."""
        self._is_closing.set()
        with suppress(OSError):  # `serve` has ended by itself
            self._listener.wake()

    def _has_message(self, timeout_s: float | None) -> bool:
        """Return whether a whole message has arrived; wait at most `timeout_s` for events, or without limit if None."""
        if not self._payloads:
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._listener:
                    self._take_client()
                elif key.fileobj is self._client:
                    self._read()
        return bool(self._payloads)

    def _answer_one(self, answer: Answer) -> None:
        started = time.monotonic()
        try:
            request = decode_request(self._payloads.popleft())
        except MalformedMessageError as error:
            logger.debug("Dropped a message, malformed: %s", error)
            return
        reply = answer(request)
        seconds = time.monotonic() - started
        if seconds > request.deadline_s:
            logger.debug("Dropped a reply, overdue: %.3f s after its request of %g s", seconds, request.deadline_s)
        elif reply is not None:
            self._send(encode(reply))

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
        assert self._client is not None
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

    def _take_client(self) -> None:
        client = self._listener.newest_client()
        if client is not None:
            self._drop_client("it has connected again")
            self._client = client
            self._selector.register(client, selectors.EVENT_READ)

    def _drop_client(self, reason: str) -> None:
        if self._client is None:
            return
        logger.debug("Closed the client's connection: %s", reason)
        self._selector.unregister(self._client)
        self._client.close()
        self._client = None
        self._frames = FrameReader()
        self._payloads.clear()
