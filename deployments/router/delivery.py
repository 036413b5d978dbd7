"""Delivery: sends the outputs of all requests of one Ingress together, each round in one write.

Serve's handle takes a message with several thread changes for each output; this connection takes one for a round.
"""

import asyncio

import msgspec

from cluster.protocol.messages import MalformedMessageError
from cluster.transport import InboxAddress, Outbox
from engine.sequence import RequestOutput

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RequestOutput] = msgspec.msgpack.Decoder(RequestOutput)


def encode_output(output: RequestOutput) -> bytes:
    """Return an output as a message."""
    return _encoder.encode(output)


def decode_output(payload: bytes) -> RequestOutput:
    """Return the output in a message.

    Raises:
        MalformedMessageError: it holds none.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"not an output: {error}") from error


class Delivery:
    """The way to one Ingress."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._outputs: list[RequestOutput] = []

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

    def close(self) -> None:
        """Close the connection."""
        self._outbox.close()

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._outbox.send(list(map(encode_output, outputs)))


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

    def close(self) -> None:
        """Close all connections."""
        for delivery in self._by_address.values():
            delivery.close()
