"""Outbox: sends messages to one inbox, in their order, over one connection that is not made again when it breaks."""

import asyncio
from typing import cast

from cluster.transport.credentials import tls_context
from cluster.transport.endpoint import set_tcp_options
from cluster.transport.errors import ConnectionLostError
from cluster.transport.frames import frame
from cluster.transport.inbox import InboxAddress

_CONNECT_S = 5.0


class Outbox(asyncio.Protocol):
    """A connection to an inbox, made in the background."""

    def __init__(self, address: InboxAddress) -> None:
        self._address = address
        self._transport: asyncio.Transport
        self._has_room = asyncio.Event()
        self._error: str | None = None
        self._connecting = asyncio.create_task(self._connect(), name="connecting to an inbox")

    @property
    def is_lost(self) -> bool:
        """Whether the connection broke or could not be made; then nothing is sent any more."""
        return self._error is not None

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent at once."""
        return self._has_room.is_set() and self._error is None

    async def room(self) -> None:
        """Wait until a message can be sent at once.

        Raises:
            ConnectionLostError: the connection broke or could not be made.
        """
        if not self._has_room.is_set():
            await self._has_room.wait()
        if self._error is not None:
            raise ConnectionLostError(self._error)

    def send(self, payloads: list[bytes]) -> None:
        """Send messages after `room`; they are lost if the connection has broken meanwhile."""
        if self._error is None:
            self._transport.write(b"".join(map(frame, payloads)))

    def close(self) -> None:
        """Close the connection once everything has been sent."""
        self._connecting.cancel()
        if self._error is None and self._has_room.is_set():
            self._transport.close()
        self._lose("the outbox was closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Show the inbox's secret; asyncio calls this."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        set_tcp_options(transport.get_extra_info("socket"))
        self._transport.write(self._address.secret)
        self._has_room.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail those who wait; asyncio calls this."""
        self._lose(str(error or "the inbox closed the connection"))

    def pause_writing(self) -> None:
        """Let senders wait, for the write buffer is full; asyncio calls this."""
        self._has_room.clear()

    def resume_writing(self) -> None:
        """Let senders go on; asyncio calls this."""
        self._has_room.set()

    async def _connect(self) -> None:
        address = self._address
        tls = tls_context(None, address.certificate, is_server=False)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: self, address.host, address.port, ssl=tls)
        except OSError as error:  # includes TLS errors and the timeout
            self._lose(f"cannot connect to the inbox: {error}")

    def _lose(self, reason: str) -> None:
        if self._error is None:
            self._error = reason
        self._has_room.set()
