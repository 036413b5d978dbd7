"""Messages on a byte stream: each is preceded by its length, four bytes in network order."""

import struct

from cluster.protocol.messages import MAX_MESSAGE_BYTES, MalformedMessageError

_LENGTH = struct.Struct("!I")


def frame(payload: bytes) -> bytes:
    """Return `payload` preceded by its length."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits a byte stream into messages, whatever pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes and return the messages that are now complete.

        Raises:
            MalformedMessageError: the length of a message is above the limit; the stream cannot be read any further.
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
