"""Server-sent events: the data of each event of a byte stream, and when it came."""

from collections.abc import AsyncIterator, Callable


async def data_of_events(stream: AsyncIterator[bytes], now_s: Callable[[], float]) -> AsyncIterator[tuple[float, str]]:
    """Yield the arrival time and the data of each event, as soon as it is complete; times are equal if it came at once.

    Lines end at LF or CR LF only. httpx's own line iterator also splits at U+2028 and others, which JSON strings may
    contain. Comments, which servers send to keep a connection open, and fields other than `data` are skipped.
    """
    rest = b""
    data: list[bytes] = []
    async for piece in stream:
        arrived_s = now_s()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            content = line.removesuffix(b"\r")
            if content.startswith(b"data:"):
                data.append(content.removeprefix(b"data:").removeprefix(b" "))
            elif not content and data:
                yield arrived_s, b"\n".join(data).decode()
                data = []
