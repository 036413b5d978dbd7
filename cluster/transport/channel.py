"""The Router's end of the wire: requests out, replies in, deadlines, and the death of a peer.

A worker on the same node is reached through a Unix socket that only this user can open, any other through TLS, in which
both sides know the other's certificate. Whoever has to wait for a peer waits for one system call of it: no thread
stands between a message and the event loop.
"""

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, cast

from cluster.protocol.messages import AnyReply, MalformedMessageError, Request, decode_reply, encode
from cluster.transport.credentials import Credentials, tls_context
from cluster.transport.endpoint import Endpoint, tune
from cluster.transport.frames import Frames, frame
from engine.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0


class ChannelError(PacelineError):
    """A call that got no reply."""


class DeadlineError(ChannelError):
    """The peer did not answer in time."""


class ConnectionLostError(ChannelError):
    """The connection broke before the reply; a new one is being made."""


class PeerGoneError(ChannelError):
    """The peer is dead, or the channel was closed."""


class Link:
    """Matches replies to the calls that wait for them; a subclass moves the bytes.

    A reply that nobody waits for (late, repeated, of another version of the group) is dropped and counted.

    Attributes:
        on_break: told why a connection broke, for those who must know although no call of theirs waits.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.dropped: Counter[str] = Counter()
        self.on_break: Callable[[str], None] | None = None
        self._calls: dict[int, asyncio.Future[AnyReply]] = {}
        self._gone: str | None = None

    async def call(self, request: Request) -> AnyReply:
        """Send a request and return the reply to it.

        Raises:
            DeadlineError: none came within the request's deadline.
            ConnectionLostError: the connection broke before the reply.
            PeerGoneError: the peer died before or meanwhile.
            MalformedMessageError: the request is too large to be sent.
        """
        deadline = await self._send_in_time(request)
        return await self._reply(request, deadline)

    async def post(self, request: Request) -> None:
        """Send a request whose receiver does not answer.

        Raises:
            DeadlineError: it could not even be sent within the request's deadline.
            ConnectionLostError: the connection broke meanwhile.
            PeerGoneError: the peer is dead.
            MalformedMessageError: the request is too large to be sent.
        """
        await self._send_in_time(request)

    def fail(self, reason: str) -> None:
        """Take the peer as dead: calls that wait, and all later ones, raise PeerGoneError."""
        self._gone = reason
        self._end_calls(PeerGoneError(reason))

    def deliver(self, payload: bytes) -> None:
        """Hand bytes from the peer to the call that waits for them."""
        try:
            reply = decode_reply(payload)
        except MalformedMessageError as error:
            self.dropped["malformed"] += 1
            logger.debug("Dropped a reply: %s", error)
            return
        call = self._calls.get(reply.round)
        if reply.version != self.version:
            self.dropped["version"] += 1
        elif call is None or call.done():
            self.dropped["late"] += 1
        else:
            call.set_result(reply)

    async def _send_in_time(self, request: Request) -> float:
        """Send a request; returns when its deadline is, on the event loop's clock."""
        if self._gone is not None:
            raise PeerGoneError(self._gone)
        payload = encode(request)
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        if not self._send_now(payload):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._send(payload)
            except TimeoutError as error:
                text = f"could not send round {request.round} in {request.deadline_s:g} s{self._trouble()}"
                raise DeadlineError(text) from error
        return deadline

    async def _reply(self, request: Request, deadline: float) -> AnyReply:
        """Wait for the reply to a request; nothing may be awaited between its last byte and this."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[AnyReply] = loop.create_future()
        self._calls[request.round] = reply
        # Of two calls a round each, `asyncio.timeout` would be a twentieth of what the Router computes.
        timer = loop.call_at(deadline, self._expire, request)
        try:
            return await reply
        finally:
            timer.cancel()
            del self._calls[request.round]

    def _expire(self, request: Request) -> None:
        reply = self._calls[request.round]
        if not reply.done():
            text = f"no reply to round {request.round} within {request.deadline_s:g} s{self._trouble()}"
            reply.set_exception(DeadlineError(text))

    def _trouble(self) -> str:
        """Return what a caller whose deadline has passed should know besides."""
        return ""

    def _end_calls(self, error: ChannelError) -> None:
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    def _send_now(self, payload: bytes) -> bool:
        """Send bytes if the peer would take them at once; return whether they were sent."""
        raise NotImplementedError

    async def _send(self, payload: bytes) -> None:
        """Send bytes as soon as the peer takes them."""
        raise NotImplementedError


class Channel(Link):
    """A connection to one worker, made at once and again whenever it breaks.

    Belongs to the event loop it is made on.
    """

    def __init__(self, endpoint: Endpoint, credentials: Credentials, *, version: int) -> None:
        super().__init__(version)
        self._endpoint = endpoint
        self._tls = tls_context(credentials, endpoint.certificate, is_server=False)
        self._connection: _Connection | None = None
        self._is_settled = asyncio.Event()  # there is a connection, or never will be
        self._last_error: OSError | None = None
        self._connecting = asyncio.create_task(self._connect(endpoint.path), name="connecting to a worker")

    def fail(self, reason: str) -> None:
        """Take the peer as dead: calls that wait, and all later ones, raise PeerGoneError."""
        super().fail(reason)
        self._connecting.cancel()
        self._is_settled.set()
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        """Give up the connection; calls that wait raise PeerGoneError."""
        self.fail("the channel was closed")

    def lost(self, connection: "_Connection", reason: str) -> None:
        """End the calls that wait: what they were sent over has broken."""
        if connection is not self._connection:
            return  # one that was given up before it was used
        self._connection = None
        if self._gone is None:
            self._is_settled.clear()
            self._connecting = asyncio.create_task(self._connect(pause_s=_FIRST_RETRY_S), name="connecting again")
        self._end_calls(ConnectionLostError(reason))
        if self._gone is None and self.on_break is not None:
            self.on_break(reason)

    def _send_now(self, payload: bytes) -> bool:
        return self._connection is not None and self._connection.send_now(payload)

    async def _send(self, payload: bytes) -> None:
        while (connection := self._connection) is None:
            await self._is_settled.wait()
            if self._gone is not None:
                raise PeerGoneError(self._gone)
        try:
            await connection.send(payload)
        except ConnectionLostError:
            if self._gone is not None:
                raise PeerGoneError(self._gone) from None
            raise

    async def _connect(self, path: str = "", pause_s: float = 0.0) -> None:
        """Connect, however often it takes; a Unix socket is tried once, for it is there for one connection."""
        while self._connection is None:
            await asyncio.sleep(pause_s)
            try:
                self._connection = await self._try_to_connect(path)
            except OSError as error:  # of TLS too
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
        tune(transport.get_extra_info("socket"))
        return connection

    def _trouble(self) -> str:
        reason = self._last_error or "it says nothing"
        return "" if self._connection is not None else f"; the worker is not reached: {reason}"


class _Connection(asyncio.Protocol):
    """One connection of a channel, from its first byte to its last."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._frames = Frames()
        self._transport: asyncio.Transport
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._frames.feed(data)
        except MalformedMessageError as error:
            self._channel.dropped["malformed"] += 1
            logger.warning("Gave up a connection to a worker: %s", error)
            self._transport.abort()
            return
        for payload in payloads:
            self._channel.deliver(payload)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._has_room.set()
        self._channel.lost(self, str(error or "the worker closed the connection"))

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def send_now(self, payload: bytes) -> bool:
        """Send one message if the peer has taken most of the earlier ones; return whether it was sent."""
        if self._is_lost or not self._has_room.is_set():
            return False
        self._transport.write(frame(payload))
        return True

    async def send(self, payload: bytes) -> None:
        """Send one message, as soon as the peer has taken most of the earlier ones."""
        await self._has_room.wait()
        if not self.send_now(payload):
            raise ConnectionLostError("the connection broke before the request was sent")

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()
