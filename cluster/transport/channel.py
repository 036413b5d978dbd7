"""Channel: the Router's link to one worker, over a Unix socket on the same node and over TLS elsewhere.

The event loop reads the socket itself, so no other thread delays a message.
"""

import asyncio
import logging
from typing import cast

from cluster.protocol.messages import MalformedMessageError
from cluster.transport.credentials import Credentials, tls_context
from cluster.transport.endpoint import Endpoint, set_tcp_options
from cluster.transport.errors import ConnectionLostError, PeerGoneError
from cluster.transport.frames import FrameReader, frame
from cluster.transport.message_link import MessageLink
from cluster.transport.protocol import OnBreak

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0


class Channel(MessageLink):
    """A connection to one worker, made at once and again whenever it breaks."""

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: Credentials,
        *,
        is_same_node: bool,
        version: int,
        on_break: OnBreak | None = None,
    ) -> None:
        """Begin to connect.

        Args:
            is_same_node: the worker is on this node, so its Unix socket can be used.
        """
        super().__init__(version, on_break)
        self._endpoint = endpoint
        self._tls = tls_context(credentials, endpoint.certificate, is_server=False)
        self._connection: _Connection | None = None
        self._is_settled = asyncio.Event()  # connected, or closed
        self._last_error: OSError | None = None
        path = endpoint.path if is_same_node else ""
        self._connecting = asyncio.create_task(self._connect(path), name="connecting to a worker")

    def close(self, reason: str = "the link was closed") -> None:
        """Close the connection for good: waiting and later calls raise PeerGoneError with this reason."""
        super().close(reason)
        self._connecting.cancel()
        self._is_settled.set()
        if self._connection is not None:
            self._connection.abort()

    def connection_lost(self, connection: "_Connection", reason: str) -> None:
        """Connect again, and fail the calls whose requests went over the broken connection."""
        if connection is not self._connection:
            return  # closed before it was ever used
        self._connection = None
        if self._close_reason is None:
            self._is_settled.clear()
            self._connecting = asyncio.create_task(self._connect(pause_s=_FIRST_RETRY_S), name="connecting again")
        self._report_break(reason)

    def _send_now(self, payload: bytes) -> bool:
        return self._connection is not None and self._connection.send_now(payload)

    async def _send(self, payload: bytes) -> None:
        while (connection := self._connection) is None:
            await self._is_settled.wait()
            if self._close_reason is not None:
                raise PeerGoneError(self._close_reason)
        try:
            await connection.send(payload)
        except ConnectionLostError:
            if self._close_reason is not None:
                raise PeerGoneError(self._close_reason) from None
            raise

    async def _connect(self, path: str = "", pause_s: float = 0.0) -> None:
        """Try until connected; the Unix socket is tried once only, because it accepts a single connection."""
        while self._connection is None:
            await asyncio.sleep(pause_s)
            try:
                self._connection = await self._try_to_connect(path)
            except OSError as error:  # includes TLS errors
                logger.debug("Cannot reach a worker yet: %s", error)
                self._last_error = error
                if not path:
                    pause_s = min(2 * pause_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
                path = ""
        self._last_error = None
        self._is_settled.set()

    async def _try_to_connect(self, path: str) -> "_Connection":
        loop, endpoint = asyncio.get_running_loop(), self._endpoint
        if path:
            return (await loop.create_unix_connection(lambda: _Connection(self), path))[1]
        transport, connection = await loop.create_connection(
            lambda: _Connection(self), endpoint.host, endpoint.port, ssl=self._tls
        )
        set_tcp_options(transport.get_extra_info("socket"))
        return connection

    def _diagnosis(self) -> str:
        if self._connection is not None:
            return ""
        return f"; cannot connect to the worker: {self._last_error or 'it does not respond'}"


class _Connection(asyncio.Protocol):
    """One connection of a channel, from opening to closing."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._frames = FrameReader()
        self._transport: asyncio.Transport
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._frames.feed(data)
        except MalformedMessageError as error:
            logger.warning("Closed a connection to a worker: %s", error)
            self._transport.abort()
            return
        for payload in payloads:
            self._channel.deliver(payload)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._has_room.set()
        self._channel.connection_lost(self, str(error or "the worker closed the connection"))

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def send_now(self, payload: bytes) -> bool:
        """Send a message if the write buffer has room; return whether it was sent."""
        if self._is_lost or not self._has_room.is_set():
            return False
        self._transport.write(frame(payload))
        return True

    async def send(self, payload: bytes) -> None:
        """Send a message as soon as the write buffer has room."""
        await self._has_room.wait()
        if not self.send_now(payload):
            raise ConnectionLostError("the connection broke before the request was sent")

    def abort(self) -> None:
        """Close the connection at once, without sending what is buffered."""
        self._transport.abort()
