"""Delivery: sends the outputs of all requests of one Ingress together, each round in one write.

Serve's handle takes a message with several thread changes for each output; this connection takes one for a round.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import InboxAddress, Outbox
from deployments.router.load import HEARTBEAT_S, Load
from engine.sequence import RequestOutput

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RequestOutput | Load] = msgspec.msgpack.Decoder(RequestOutput | Load)


def encode(content: RequestOutput | Load) -> bytes:
    """Return an output or a load as a message."""
    return _encoder.encode(content)


def decode(payload: bytes) -> RequestOutput | Load:
    """Return the output or the load in a message.

    Raises:
        MalformedMessageError: it holds none.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"neither an output nor a load: {error}") from error


class Delivery:
    """The way to one Ingress."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._outputs: list[RequestOutput] = []
        self._num_requests = 0
        self._reported: Load | None = None
        self._reported_at = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the connection broke; a new Delivery must be made."""
        return self._outbox.is_lost

    async def put(self, outputs: list[RequestOutput]) -> None:
        """Send outputs with those of the other requests that have some now; wait while the Ingress reads too slowly.

        Raises:
            ConnectionLostError: the Ingress cannot be reached.
        """
        await self._outbox.room()
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs += outputs

    @contextmanager
    def holding(self, num_requests: int) -> Iterator[None]:
        """Count requests as those of this Ingress while the block runs."""
        self._num_requests += num_requests
        try:
            yield
        finally:
            self._num_requests -= num_requests

    def report(
        self, router: str, num_requests: int, drain_rate: float, num_ingresses: int, leaving: Iterable[str]
    ) -> None:
        """Tell the Ingress of this Router's queue, if that has changed or was not told for a while."""
        load = Load(router, num_requests, self._num_requests, round(drain_rate, 1), num_ingresses, tuple(leaving))
        now = time.monotonic()
        if self._outbox.has_room and (load != self._reported or now - self._reported_at >= HEARTBEAT_S):
            self._reported, self._reported_at = load, now
            self._outbox.send([encode(load)])

    def close(self) -> None:
        """Close the connection."""
        self._outbox.close()

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._outbox.send(list(map(encode, outputs)))


class Deliveries:
    """The way to each Ingress that has sent a request."""

    def __init__(self) -> None:
        self._by_address: dict[InboxAddress, Delivery] = {}

    def to(self, address: InboxAddress) -> Delivery:
        """Return the way to an inbox; connect if there is none, or if it was lost."""
        delivery = self._by_address.get(address)
        if delivery is None or delivery.is_lost:
            self._by_address = {key: other for key, other in self._by_address.items() if not other.is_lost}
            delivery = self._by_address[address] = Delivery(Outbox(address))
        return delivery

    def report(
        self, router: str, num_requests: int, drain_rate: float, leaving: Callable[[InboxAddress], Iterable[str]]
    ) -> None:
        """Tell every Ingress of this Router's queue.

        Args:
            leaving: returns the requests of an Ingress that another Router may have.
        """
        connected = {address: delivery for address, delivery in self._by_address.items() if not delivery.is_lost}
        for address, delivery in connected.items():
            delivery.report(router, num_requests, drain_rate, len(connected), leaving(address))

    def close(self) -> None:
        """Close all connections."""
        for delivery in self._by_address.values():
            delivery.close()
