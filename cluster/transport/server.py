"""Server: a worker's end of the connections to its clients, which are Routers or other workers.

The thread that computes also waits on the sockets. So a reply leaves as soon as it is computed, and a drafter can look
for the next request between two forward passes.
"""

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from cluster.protocol.messages import MalformedMessageError, decode_request
from cluster.transport.listener import MAX_HANDSHAKES, Answer, Listener

logger = logging.getLogger(__name__)


class Server:
    """Answers the requests of its clients one at a time, in the thread that calls `serve`.

    Attributes:
        host: an address of this node, whose id is `node_id`.
        selector: calls the data of the keys that are ready.
        threads: for handshakes.
        payloads: messages that are not answered yet.
    """

    def __init__(self, host: str, node_id: str) -> None:
        """Make a server without clients."""
        self.host, self.node_id = host, node_id
        self.selector = selectors.DefaultSelector()
        self.threads = ThreadPoolExecutor(MAX_HANDSHAKES, "handshake")
        self.payloads: deque[tuple[Listener, bytes]] = deque()
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

        `work` is called while no request waits: after each event, and again for as long as it returns True. Malformed
        messages and late replies are dropped. An exception of an answer or of `work` ends serving and closes the
        connections, so the clients learn of it at once.
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
