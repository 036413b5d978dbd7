"""Messages on a byte stream, each preceded by its length: four bytes in network order."""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from typing import cast

from cluster.protocol.messages import MAX_MESSAGE_BYTES, MalformedMessageError

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!I")
_TCP_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 10,  # seconds
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,  # milliseconds; keepalive does not run while sent data is unacknowledged
}


def set_options(connection: socket.socket) -> None:
    """Send small messages without delay, and detect within half a minute that the peer's node has vanished."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def frame(payload: bytes) -> bytes:
    """Return `payload` preceded by its length."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits a byte stream, which arrives in pieces of any size, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with `data`; raise MalformedMessageError if a length is too large."""
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            if size > MAX_MESSAGE_BYTES:
                raise MalformedMessageError(f"message of {size:,} bytes announced, the limit is {MAX_MESSAGE_BYTES:,}")
            end = start + _LENGTH.size + size
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return payloads


class FrameConnection(asyncio.Protocol):
    """One end of a connection that carries messages, none after `is_lost`; asyncio calls its Protocol methods."""

    def __init__(self, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """`on_message` closes the connection by raising MalformedMessageError; `on_lost` gets the reason, once."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = FrameReader()
        self._transport: asyncio.Transport
        self._has_room = asyncio.Event()
        self.is_lost = False

    def send(self, payloads: Iterable[bytes]) -> None:
        """Send messages in one write; they are lost if the connection is."""
        if not self.is_lost:
            self._transport.write(b"".join(map(frame, payloads)))

    @property
    def has_room(self) -> bool:
        """Whether the connection is open and its write buffer has room."""
        return self._has_room.is_set() and not self.is_lost

    async def room(self) -> bool:
        """Wait until the write buffer has room; return False if the connection has ended instead."""
        await self._has_room.wait()
        return not self.is_lost

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        set_options(transport.get_extra_info("socket"))
        self._has_room.set()

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._on_message(payload)
        except MalformedMessageError as error:
            logger.warning("Closed a connection: %s", error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._has_room.set()
        self._on_lost(str(error or "the peer closed the connection"))

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()
