"""Inbox: receives messages from many senders, over TLS; each shows the inbox's secret before its first message.

Nobody answers: what must be answered goes through Ray or over a `Link`.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple, cast

from cluster.protocol.messages import MalformedMessageError
from cluster.transport.credentials import make_credentials, tls_context
from cluster.transport.endpoint import set_tcp_options
from cluster.transport.frames import FrameReader

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
    """Listens until closed; calls `deliver` with each message, on the event loop that it was opened on."""

    def __init__(self, server: asyncio.Server, address: InboxAddress, connections: "set[_Sender]") -> None:
        self._server = server
        self.address = address
        self._connections = connections

    @classmethod
    async def open(cls, host: str, deliver: Callable[[bytes], None]) -> "Inbox":
        """Listen on a free port of `host`; a message that `deliver` calls malformed ends its connection."""
        credentials = make_credentials()
        secret = secrets.token_bytes(SECRET_BYTES)
        connections: set[_Sender] = set()
        server = await asyncio.get_running_loop().create_server(
            lambda: _Sender(secret, deliver, connections),
            host,
            0,
            ssl=tls_context(credentials, None, is_server=True),
            ssl_handshake_timeout=_HANDSHAKE_S,
        )
        port = server.sockets[0].getsockname()[1]
        return cls(server, InboxAddress(host, port, credentials.certificate, secret), connections)

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._server.close()
        for connection in list(self._connections):
            connection.abort()


class _Sender(asyncio.Protocol):
    """One sender's connection: its secret, then its messages."""

    def __init__(self, secret: bytes, deliver: Callable[[bytes], None], connections: "set[_Sender]") -> None:
        self._secret = secret
        self._deliver = deliver
        self._connections = connections
        self._start = b""
        self._frames: FrameReader | None = None
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        self._connections.add(self)
        set_tcp_options(transport.get_extra_info("socket"))
        self._deadline = asyncio.get_running_loop().call_later(_HANDSHAKE_S, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            self._start += data
            if len(self._start) < SECRET_BYTES:
                return
            if not hmac.compare_digest(self._start[:SECRET_BYTES], self._secret):
                logger.warning("Refused a sender that does not know the secret")
                self.abort()
                return
            self._deadline.cancel()
            self._frames, data = FrameReader(), self._start[SECRET_BYTES:]
        try:
            for payload in self._frames.feed(data):
                self._deliver(payload)
        except MalformedMessageError as error:
            logger.warning("Closed a sender's connection: %s", error)
            self.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._deadline.cancel()
        self._connections.discard(self)

    def abort(self) -> None:
        self._transport.abort()
