"""Stream: buffers the committed tokens of one request, and delivers those of one or several rounds at a time."""

import asyncio
import time
from collections.abc import Sequence

from engine.sequence import RequestOutput


class Stream:
    """The outputs of one request that have not been delivered yet.

    The first tokens are delivered at once, and so are the last of each sequence. In between, outputs that come within
    `interval_s` of a delivery wait for the first round after the interval, for at most a second interval: each delivery
    takes an HTTP chunk and wakes three processes, which takes longer than a short round.
    """

    def __init__(self, interval_s: float, *, gathers_first: bool = False, has_tokens: bool = False) -> None:
        """Begin a stream.

        Args:
            gathers_first: do not deliver the first tokens at once, but after the interval.
            has_tokens: another Router has delivered its first tokens.
        """
        self.started = time.monotonic()
        self.has_tokens = has_tokens
        self._interval_s = interval_s
        self._due = asyncio.get_running_loop().time() + interval_s if gathers_first else 0.0
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        self._is_ready = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        """Add the outputs of a round."""
        self.has_tokens = True
        self._outputs += outputs
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due or any(output.finish_reason is not None for output in outputs):
            self._deliver()
        elif self._timer is None:
            self._timer = loop.call_at(self._due + self._interval_s, self._deliver)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, which comes after the outputs before it."""
        self._error = error
        self._deliver()

    async def next(self) -> list[RequestOutput]:
        """Return the next outputs, oldest first; several rounds make several outputs of a sequence.

        Raises:
            Exception: the error that ended the stream.
        """
        await self._is_ready.wait()
        self._is_ready.clear()
        if not self._outputs:
            assert self._error is not None
            raise self._error
        if self._error is not None:
            self._is_ready.set()
        self._due = asyncio.get_running_loop().time() + self._interval_s
        return self.take()

    def take(self) -> list[RequestOutput]:
        """Return all outputs, due or not."""
        self.close()
        outputs, self._outputs = self._outputs, []
        return outputs

    def close(self) -> None:
        """Cancel the delivery that was planned."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deliver(self) -> None:
        self.close()
        self._is_ready.set()
