"""Messages on a stream of bytes: each behind its length, four bytes in network order."""

import struct

from cluster.protocol.messages import MAX_MESSAGE_BYTES, MalformedMessageError

_LENGTH = struct.Struct("!I")


def frame(payload: bytes) -> bytes:
    """Return `payload` as it goes onto a stream."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts a stream back into messages, however the network has cut it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take what has arrived and return the messages that are whole now.

        Raises:
            MalformedMessageError: a message is announced that no peer may send; the stream is of no more use.
        """
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
