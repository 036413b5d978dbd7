"""MessageLink: encodes requests, matches replies to calls, and enforces deadlines; a subclass moves the bytes."""

import asyncio
import logging
from abc import ABC, abstractmethod

from cluster.protocol.messages import AnyReply, MalformedMessageError, RoundMessage, decode_reply, encode
from cluster.transport.errors import ConnectionLostError, DeadlineError, PeerGoneError, TransportError
from cluster.transport.protocol import OnBreak

logger = logging.getLogger(__name__)


class MessageLink(ABC):
    """A `Link` over anything that moves bytes.

    A reply is matched to its call by the round. One that no call waits for (it came late or twice, or has another
    version) is dropped.
    """

    def __init__(self, version: int, on_break: OnBreak | None = None) -> None:
        self.version = version
        self._on_break = on_break
        self._calls: dict[int, asyncio.Future[AnyReply]] = {}
        self._close_reason: str | None = None

    async def call(self, request: RoundMessage) -> AnyReply:
        """Send a request and return its reply; see `Link.call`."""
        deadline = await self._send_in_time(request)
        return await self._reply(request, deadline)

    async def post(self, request: RoundMessage) -> None:
        """Send a request that gets no reply; see `Link.post`."""
        await self._send_in_time(request)

    def close(self, reason: str = "the link was closed") -> None:
        """Close the connection for good: waiting and later calls raise PeerGoneError with this reason."""
        self._close_reason = reason
        self._fail_calls(PeerGoneError(reason))

    def deliver(self, payload: bytes) -> None:
        """Give the bytes of a reply to the call that waits for it."""
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

    def _report_break(self, reason: str) -> None:
        """Fail the calls that wait, because the connection broke, and call `on_break`."""
        self._fail_calls(ConnectionLostError(reason))
        if self._close_reason is None and self._on_break is not None:
            self._on_break(reason)

    async def _send_in_time(self, request: RoundMessage) -> float:
        """Send a request and return its deadline, on the event loop's clock."""
        if self._close_reason is not None:
            raise PeerGoneError(self._close_reason)
        payload = encode(request)
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        if not self._send_now(payload):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._send(payload)
            except TimeoutError as error:
                seconds = f"{request.deadline_s:g} s{self._diagnosis()}"
                raise DeadlineError(f"could not send round {request.round} in {seconds}") from error
        return deadline

    async def _reply(self, request: RoundMessage, deadline: float) -> AnyReply:
        """Wait for the reply; nothing may be awaited between sending the request and calling this."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[AnyReply] = loop.create_future()
        self._calls[request.round] = reply
        # `asyncio.timeout` here would add a twentieth to the Router's computing time of a round.
        timer = loop.call_at(deadline, self._expire, request)
        try:
            return await reply
        finally:
            timer.cancel()
            del self._calls[request.round]

    def _expire(self, request: RoundMessage) -> None:
        reply = self._calls[request.round]
        if not reply.done():
            seconds = f"{request.deadline_s:g} s{self._diagnosis()}"
            reply.set_exception(DeadlineError(f"no reply to round {request.round} within {seconds}"))

    def _diagnosis(self) -> str:
        """Return what else the message of a missed deadline should say."""
        return ""

    def _fail_calls(self, error: TransportError) -> None:
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    @abstractmethod
    def _send_now(self, payload: bytes) -> bool:
        """Send a message if that is possible without waiting; return whether it was sent."""

    @abstractmethod
    async def _send(self, payload: bytes) -> None:
        """Send a message as soon as the peer has room for it."""
