"""A worker's end of the wire: one client, answered by the thread that computes.

That thread waits on the socket itself, so a reply leaves the moment it is ready, and a drafter can look for the next
request between two forward passes. Others are at the doors: whoever is still shaking hands keeps nobody waiting.
"""

import logging
import os
import queue
import selectors
import socket
import ssl
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cluster.channel import Endpoint
from cluster.credentials import make_credentials, tls_context
from cluster.frames import Frames, frame
from cluster.messages import AnyReply, AnyRequest, MalformedMessageError, decode_request, encode

logger = logging.getLogger(__name__)

_STOP_CHECK_S = 0.1
_HANDSHAKE_S = 5.0
_MAX_HANDSHAKES = 16
_READ_BYTES = 2**18


class Server:
    """Listens on a Unix socket for a client on this node and with TLS for one elsewhere.

    Whoever opens the Unix socket runs as this user; whoever comes by TLS holds the one certificate that is let in. A
    later connection replaces an earlier one: it is the same client, which has lost that one.
    """

    def __init__(self, host: str, client_certificate: str) -> None:
        self.num_malformed = 0
        self.num_overdue = 0
        self.num_refused = 0
        self._stopping = threading.Event()
        own = make_credentials()
        self._tls = tls_context(own, client_certificate, is_server=True)
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")  # only this user may enter it
        path = os.path.join(self._folder.name, "worker.sock")
        self._near = socket.socket(socket.AF_UNIX)
        self._near.bind(path)
        self._near.listen()
        self._far = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.endpoint = Endpoint(path, host, self._far.getsockname()[1], own.certificate)
        self._arrivals: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._bell, self._bell_button = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._client: socket.socket | None = None
        self._frames = Frames()
        self._payloads: deque[bytes] = deque()
        self._doorkeeper = threading.Thread(target=self._keep_doors, name="doorkeeper", daemon=True)
        self._doorkeeper.start()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Return whether a message waits, after at most `timeout_s`."""
        if not self._payloads:
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._bell:
                    self._welcome()
                else:
                    self._read()
        return bool(self._payloads)

    def serve(self, answer: Callable[[AnyRequest], AnyReply | None], work: Callable[[], bool] = lambda: False) -> None:
        """Answer requests, one at a time and in their order, until `stop` is called from another thread.

        A malformed message is dropped and counted. So is a reply that took longer than its caller waits.

        Args:
            work: called over and over while no request waits, as long as it returns True.
        """
        is_working = False
        try:
            while not self._stopping.is_set():
                if self.poll(0 if is_working else _STOP_CHECK_S):
                    self._serve_one(answer)
                    is_working = True
                elif is_working:
                    is_working = work()
        finally:
            self._close()

    def stop(self) -> None:
        """Make `serve` return after the request it is at."""
        self._stopping.set()

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
            self._send(encode(reply), request.deadline_s)

    def _send(self, payload: bytes, limit_s: float) -> None:
        if self._client is None:
            return
        try:
            self._client.settimeout(limit_s)
            self._client.sendall(frame(payload))
            self._client.settimeout(0)
        except OSError as error:
            self._drop_client(f"a reply could not be sent: {error}")

    def _read(self) -> None:
        """Take all there is: what TLS has unpacked already, no selector tells of."""
        assert self._client is not None
        try:
            while data := self._client.recv(_READ_BYTES):
                self._payloads += self._frames.feed(data)
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
        self._bell.recv(1)
        client = self._arrivals.get()
        if self._client is not None:
            self._drop_client("it has connected again")
        client.settimeout(0)
        self._client = client
        self._frames = Frames()
        self._selector.register(client, selectors.EVENT_READ)

    def _drop_client(self, reason: str) -> None:
        assert self._client is not None
        logger.debug("The client is gone: %s", reason)
        self._selector.unregister(self._client)
        self._client.close()
        self._client = None
        self._payloads.clear()

    def _keep_doors(self) -> None:
        with selectors.DefaultSelector() as doors, ThreadPoolExecutor(_MAX_HANDSHAKES, "handshake") as handshakes:
            doors.register(self._near, selectors.EVENT_READ)
            doors.register(self._far, selectors.EVENT_READ)
            while not self._stopping.is_set():
                for key, _ in doors.select(_STOP_CHECK_S):
                    if key.fileobj is self._far:
                        handshakes.submit(self._shake_hands, self._far.accept()[0])
                        continue
                    # A worker is killed when it is no longer wanted, and would leave its folder behind. A client on
                    # this node that does lose its connection comes by TLS from then on.
                    client = self._near.accept()[0]
                    doors.unregister(self._near)
                    self._near.close()
                    self._folder.cleanup()
                    self._admit(client)

    def _shake_hands(self, stranger: socket.socket) -> None:
        try:
            stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stranger.settimeout(_HANDSHAKE_S)
            client = self._tls.wrap_socket(stranger, server_side=True)
        except OSError as error:  # of TLS too
            self.num_refused += 1
            logger.warning("Refused a connection: %s", error)
            stranger.close()
        else:
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        self._arrivals.put(client)
        self._bell_button.send(b"!")

    def _close(self) -> None:
        self._doorkeeper.join()
        if self._client is not None:
            self._drop_client("the server stops")
        for resource in (self._near, self._far, self._bell, self._bell_button, self._selector):
            resource.close()
        self._folder.cleanup()
