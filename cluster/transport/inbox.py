"""Inbox and Outbox: messages from many senders to one receiver, over TLS; there are no replies.

A sender shows the inbox's secret before its first message.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple

from cluster.transport.credentials import make_credentials, tls_context
from cluster.transport.frames import FrameConnection

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
_HANDSHAKE_S = 5.0


class InboxAddress(NamedTuple):
    """Where an inbox listens, the certificate that proves its identity, and the secret that it asks for."""

    host: str
    port: int
    certificate: str
    secret: bytes

    def __repr__(self) -> str:
        return f"InboxAddress({self.host!r}, {self.port}, secret=********)"


class Inbox:
    """Listens until closed; `address` is what a sender needs."""

    def __init__(self, server: asyncio.Server, address: InboxAddress, senders: "set[_Sender]") -> None:
        self._server = server
        self.address = address
        self._senders = senders

    @classmethod
    async def open(cls, host: str, deliver: Callable[[bytes], None]) -> "Inbox":
        """Listen on a free port of `host`; `deliver` gets each message, on this event loop.

        A MalformedMessageError that it raises closes the sender's connection.
        """
        credentials, secret = make_credentials(), secrets.token_bytes(SECRET_BYTES)
        senders: set[_Sender] = set()
        server = await asyncio.get_running_loop().create_server(
            lambda: _Sender(secret, deliver, senders),
            host,
            0,
            ssl=tls_context(credentials, None, is_server=True),
            ssl_handshake_timeout=_HANDSHAKE_S,
        )
        port = server.sockets[0].getsockname()[1]
        return cls(server, InboxAddress(host, port, credentials.certificate, secret), senders)

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._server.close()
        for sender in list(self._senders):
            sender.abort()


class _Sender(FrameConnection):
    """The inbox's end of one sender's connection: its secret, then its messages."""

    def __init__(self, secret: bytes, deliver: Callable[[bytes], None], senders: "set[_Sender]") -> None:
        super().__init__(deliver, self._forget)
        self._secret = secret
        self._senders = senders
        self._start: bytes | None = b""
        self._deadline: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._senders.add(self)
        self._deadline = asyncio.get_running_loop().call_later(_HANDSHAKE_S, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._start is not None:
            self._start += data
            if len(self._start) < SECRET_BYTES:
                return
            if not hmac.compare_digest(self._start[:SECRET_BYTES], self._secret):
                logger.warning("Refused a sender that does not know the secret")
                self.abort()
                return
            self._deadline.cancel()
            data, self._start = self._start[SECRET_BYTES:], None
        super().data_received(data)

    def _forget(self, _: str) -> None:
        self._deadline.cancel()
        self._senders.discard(self)


class Outbox(FrameConnection):
    """Sends messages to one inbox, in their order, over one connection that is not made again when it breaks."""

    def __init__(self, address: InboxAddress, on_lost: Callable[[str], None] = lambda _: None) -> None:
        """Begin to connect; `on_lost` is called once with the reason when the connection breaks or cannot be made."""
        super().__init__(lambda _: None, on_lost)
        self._address = address
        self._unsent: list[bytes] | None = []
        self._connecting = asyncio.create_task(self._connect(), name="connecting to an inbox")

    def post(self, payloads: list[bytes]) -> None:
        """Send messages, once the connection is made; they are lost if it breaks."""
        if self._unsent is None:
            self.send(payloads)
        else:
            self._unsent += payloads

    def close(self) -> None:
        """Close the connection once everything has been sent."""
        if self._unsent is None:
            self._transport.close()
        elif self._connecting.cancel():
            self.connection_lost(ConnectionError("the outbox was closed"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the inbox's secret, then the waiting messages."""
        super().connection_made(transport)
        self._transport.write(self._address.secret)
        self.send(self._unsent or [])
        self._unsent = None

    async def _connect(self) -> None:
        address = self._address
        tls = tls_context(None, address.certificate, is_server=False)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await asyncio.get_running_loop().create_connection(lambda: self, address.host, address.port, ssl=tls)
        except OSError as error:  # includes TLS errors and the timeout
            self.connection_lost(ConnectionError(f"cannot connect to the inbox: {error}"))
