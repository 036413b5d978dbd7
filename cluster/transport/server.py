"""A worker's end of the wire: one client, answered by the thread that computes.

That thread waits on the socket itself, so a reply leaves the moment it is ready, and a drafter can look for the next
request between two forward passes.
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

from cluster.protocol.messages import AnyReply, AnyRequest, MalformedMessageError, decode_request, encode
from cluster.transport.frames import Frames, frame
from cluster.transport.listener import Doors

if TYPE_CHECKING:
    import socket

logger = logging.getLogger(__name__)

_READ_BYTES = 2**18
_SEND_S = 10.0


class Server:
    """Serves whoever came in last: it is always the same client, which has lost its earlier connection."""

    def __init__(self, host: str, client_certificate: str) -> None:
        self.num_malformed = 0
        self.num_overdue = 0
        self._stopping = threading.Event()
        self._doors = Doors(host, client_certificate)
        self.endpoint = self._doors.endpoint
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._doors, selectors.EVENT_READ)
        self._client: socket.socket | None = None
        self._frames = Frames()
        self._payloads: deque[bytes] = deque()

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Return whether a message waits; after at most `timeout_s`, or with None once anything has happened."""
        if not self._payloads:
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._doors:
                    self._welcome()
                elif key.fileobj is self._client:
                    self._read()
        return bool(self._payloads)

    def serve(self, answer: Callable[[AnyRequest], AnyReply | None], work: Callable[[], bool] = lambda: False) -> None:
        """Answer requests, one at a time and in their order, until `stop` is called from another thread.

        A malformed message is dropped and counted. So is a reply that took longer than its caller waits. What `answer`
        or `work` raises ends it; the client learns that at once.

        Args:
            work: called over and over while no request waits, as long as it returns True.
        """
        is_working = False
        try:
            while not self._stopping.is_set():
                if self.poll(0 if is_working else None):
                    self._serve_one(answer)
                    is_working = True
                elif is_working:
                    is_working = work()
        finally:
            self._drop_client("the server stops")
            self._doors.close()
            self._selector.close()

    def stop(self) -> None:
        """Make `serve` return after the request it is at."""
        self._stopping.set()
        with suppress(OSError):  # it has ended by itself
            self._doors.ring()

    def _serve_one(self, answer: Callable[[AnyRequest], AnyReply | None]) -> None:
        started = time.monotonic()
        try:
            request = decode_request(self._payloads.popleft())
        except MalformedMessageError as error:
            self.num_malformed += 1
            logger.debug("Dropped a message: %s", error)
            return
        reply = answer(request)
        if time.monotonic() - started > request.deadline_s:
            self.num_overdue += 1
        elif reply is not None:
            self._send(encode(reply))

    def _send(self, payload: bytes) -> None:
        if self._client is None:
            return
        data = frame(payload)
        try:
            with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                data = data[self._client.send(data) :]
            if data:  # more than there was room for
                self._client.settimeout(_SEND_S)
                self._client.sendall(data)
                self._client.setblocking(False)
        except OSError as error:
            self._drop_client(f"a reply could not be sent: {error}")

    def _read(self) -> None:
        """Take what has arrived until a message is whole; of more the selector tells again."""
        assert self._client is not None
        try:
            while data := self._client.recv(_READ_BYTES):
                self._payloads += self._frames.feed(data)
                if self._payloads:
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except MalformedMessageError as error:
            self.num_malformed += 1
            self._drop_client(str(error))
        except OSError as error:
            self._drop_client(str(error))
        else:
            self._drop_client("it closed the connection")

    def _welcome(self) -> None:
        client = self._doors.take()
        if client is not None:
            self._drop_client("it has connected again")
            self._client = client
            self._selector.register(client, selectors.EVENT_READ)

    def _drop_client(self, reason: str) -> None:
        if self._client is None:
            return
        logger.debug("The client is gone: %s", reason)
        self._selector.unregister(self._client)
        self._client.close()
        self._client = None
        self._frames = Frames()
        self._payloads.clear()
