"""Link: the Router's end of the connection to one worker, the Connector that makes it, and the errors of a call."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from cluster.protocol.messages import AnyReply, MalformedMessageError, RoundMessage, decode_reply, encode
from cluster.transport.credentials import Credentials, make_credentials, tls_context
from cluster.transport.frames import FrameConnection
from engine.errors import PacelineError

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0

OnBreak = Callable[[str], None]
"""Called with the reason, on the event loop, each time an established connection breaks; not after `Link.close`."""


class TransportError(PacelineError):
    """A call got no reply; base of the three reasons."""


class DeadlineError(TransportError):
    """The worker did not answer in time."""


class ConnectionLostError(TransportError):
    """The connection broke before the reply came; the link is connecting again."""


class PeerGoneError(TransportError):
    """The worker is dead, or the link was closed; no later call can succeed."""


class Endpoint(NamedTuple):
    """Where a worker listens, and the certificate that proves its identity.

    `path` is a Unix socket for one connection from the node with Ray's id `node_id`; empty if there is none.
    """

    node_id: str
    path: str
    host: str
    port: int
    certificate: str


class Link:
    """Sends requests to one worker, and connects again whenever the connection breaks; used on one event loop.

    A reply belongs to the call of its round. Late and repeated replies, and replies of another `version`, are dropped.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: Credentials,
        *,
        is_same_node: bool,
        version: int,
        on_break: OnBreak | None = None,
    ) -> None:
        self.version = version
        self._endpoint = endpoint
        self._credentials = credentials
        self._on_break = on_break
        self._calls: dict[int, asyncio.Future[AnyReply]] = {}
        self._close_reason: str | None = None
        self._connection: FrameConnection | None = None
        self._obstacle = "it does not respond"
        path = endpoint.path if is_same_node else ""
        self._connecting = asyncio.create_task(self._connect(path), name="connecting to a worker")

    async def call(self, request: RoundMessage) -> AnyReply:
        """Send a request and return its reply; raise a TransportError, or MalformedMessageError if it is too large."""
        return await (await self.begin(request))

    async def begin(self, request: RoundMessage) -> asyncio.Future[AnyReply]:
        """Send a request, and return the future of its reply; both raise what `call` raises."""
        deadline = await self.post(request)  # after which nothing may be awaited before the reply can be taken
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[AnyReply] = loop.create_future()
        self._calls[request.round] = reply
        # `asyncio.timeout` here would add a twentieth to the Router's computing time of a round.
        timer = loop.call_at(deadline, self._expire, request)

        def forget(_: object) -> None:
            timer.cancel()
            del self._calls[request.round]

        reply.add_done_callback(forget)
        return reply

    async def post(self, request: RoundMessage) -> float:
        """Send a request, and return the event loop's time of its deadline; raises what `call` raises.

        A caller that waits for no reply learns only from `on_break` that the request may be lost.
        """
        if self._close_reason is not None:
            raise PeerGoneError(self._close_reason)
        payload = encode(request)
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        connection = self._connection
        if connection is None or not connection.has_room:
            try:
                async with asyncio.timeout_at(deadline):
                    connection = await self._connection_with_room()
            except TimeoutError as error:
                raise self._late("could not send", request) from error
        connection.send([payload])
        return deadline

    def close(self, reason: str = "the link was closed") -> None:
        """Close the connection for good: waiting and later calls raise PeerGoneError with this reason."""
        self._close_reason = reason
        self._fail_calls(PeerGoneError(reason))
        self._connecting.cancel()
        if self._connection is not None:
            self._connection.abort()

    async def _connect(self, path: str = "", pause_s: float = 0.0) -> None:
        """Try until connected; the Unix socket is tried once only, because it accepts a single connection."""
        while self._connection is None:
            await asyncio.sleep(pause_s)
            try:
                self._connection = await self._open(path)
            except OSError as error:  # includes TLS errors
                self._obstacle = str(error)
                if not path:
                    pause_s = min(2 * pause_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
                path = ""

    async def _open(self, path: str) -> FrameConnection:
        loop, endpoint = asyncio.get_running_loop(), self._endpoint
        connection = FrameConnection(self._deliver, lambda reason: self._lose(connection, reason))
        if path:
            await loop.create_unix_connection(lambda: connection, path)
        else:
            tls = tls_context(self._credentials, endpoint.certificate, is_server=False)
            await loop.create_connection(lambda: connection, endpoint.host, endpoint.port, ssl=tls)
        if not connection.has_room:
            raise ConnectionResetError("the worker closed the connection at once")
        return connection

    async def _connection_with_room(self) -> FrameConnection:
        while True:
            if self._close_reason is not None:
                raise PeerGoneError(self._close_reason)
            if self._connection is None:
                await asyncio.wait([self._connecting])
            elif await self._connection.room() and self._connection.has_room:  # no other call has filled it meanwhile
                return self._connection

    def _deliver(self, payload: bytes) -> None:
        try:
            reply = decode_reply(payload)
        except MalformedMessageError as error:
            logger.debug("Dropped a reply, malformed: %s", error)
            return
        call = self._calls.get(reply.round)
        if reply.version != self.version:
            logger.debug("Dropped a reply, version %d: this link has version %d", reply.version, self.version)
        elif call is None or call.done():
            logger.debug("Dropped a reply, late: no call waits for round %d", reply.round)
        else:
            call.set_result(reply)

    def _lose(self, connection: FrameConnection, reason: str) -> None:
        if connection is not self._connection:
            return  # it was lost before it was used
        self._connection, self._obstacle = None, reason
        self._fail_calls(ConnectionLostError(reason))
        if self._close_reason is None:
            self._connecting = asyncio.create_task(self._connect(pause_s=_FIRST_RETRY_S), name="connecting again")
            if self._on_break is not None:
                self._on_break(reason)

    def _expire(self, request: RoundMessage) -> None:
        reply = self._calls.get(request.round)
        if reply is not None and not reply.done():
            reply.set_exception(self._late("no reply to", request))

    def _late(self, failure: str, request: RoundMessage) -> DeadlineError:
        diagnosis = "" if self._connection is not None else f"; cannot connect to the worker: {self._obstacle}"
        return DeadlineError(f"{failure} round {request.round} within {request.deadline_s:g} s{diagnosis}")

    def _fail_calls(self, error: TransportError) -> None:
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)


class Connector:
    """Connects the Router to its workers; `identity`, which proves this process to them, is public."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._credentials = make_credentials()
        self.identity = self._credentials.certificate

    def connect(self, endpoint: Endpoint, *, version: int, on_break: OnBreak | None = None) -> Link:
        is_same_node = endpoint.node_id == self._node_id
        return Link(endpoint, self._credentials, is_same_node=is_same_node, version=version, on_break=on_break)
