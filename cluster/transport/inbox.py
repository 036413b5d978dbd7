"""An inbox and its Outboxes: messages from many senders to one receiver, over mutual TLS; there are no replies."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from cluster.transport.credentials import Credentials, make_credentials, tls_context
from cluster.transport.frames import FrameConnection

_HANDSHAKE_S = 5.0


class InboxAddress(NamedTuple):
    """Where an inbox listens, the certificate that proves its identity, and the credentials for all senders."""

    host: str
    port: int
    certificate: str
    senders: Credentials


async def open_inbox(host: str, deliver: Callable[[bytes], None]) -> tuple[asyncio.Server, InboxAddress]:
    """Listen on a free port; `deliver` gets each message, and closes its connection by a MalformedMessageError."""
    credentials, senders = make_credentials(), make_credentials()
    server = await asyncio.get_running_loop().create_server(
        lambda: FrameConnection(deliver, lambda _: None),
        host,
        0,
        ssl=tls_context(credentials, senders.certificate, is_server=True),
        ssl_handshake_timeout=_HANDSHAKE_S,
    )
    return server, InboxAddress(host, server.sockets[0].getsockname()[1], credentials.certificate, senders)


class Outbox(FrameConnection):
    """Sends messages to one inbox, in order, over one connection that is not made again when it breaks."""

    def __init__(self, address: InboxAddress, on_lost: Callable[[str], None] = lambda _: None) -> None:
        """Begin to connect; `on_lost` gets the reason, once, if the connection breaks or cannot be made."""
        super().__init__(lambda _: None, on_lost)
        self._unsent: list[bytes] = []
        self._is_connected = False
        self._connecting = asyncio.create_task(self._connect(address), name="connecting to an inbox")

    def post(self, payload: bytes) -> None:
        """Send a message with the others of this turn of the event loop, once the connection is made."""
        if self._is_connected and not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(payload)

    def close(self) -> None:
        """Close the connection once everything has been sent."""
        if self._is_connected:
            self._flush()
            self._transport.close()
        elif self._connecting.cancel():
            self.connection_lost(ConnectionError("the outbox was closed"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._is_connected = True
        self._flush()

    def _flush(self) -> None:
        payloads, self._unsent = self._unsent, []
        self.send(payloads)

    async def _connect(self, address: InboxAddress) -> None:
        tls = tls_context(address.senders, address.certificate, is_server=False)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await asyncio.get_running_loop().create_connection(lambda: self, address.host, address.port, ssl=tls)
        except OSError as error:  # includes TLS errors and the timeout
            self.connection_lost(ConnectionError(f"cannot connect to the inbox: {error}"))
