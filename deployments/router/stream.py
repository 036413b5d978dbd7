"""Stream: the committed tokens of one request on their way to its client, a round's or several rounds' at a time."""

import asyncio
import math
import time
from collections.abc import Sequence

from engine.sequence import RequestOutput


class Stream:
    """What a client has not been given yet.

    Its first tokens go at once, and so do the last of each sequence. In between, what comes within `interval_s` of a
    delivery goes with the first round after that (or, where none comes, after as long again): each delivery costs an
    HTTP chunk and the waking of three processes, which short rounds would spend more on than on tokens. `math.inf`
    delivers sequences whole.
    """

    def __init__(self, interval_s: float) -> None:
        self.started = time.monotonic()
        self.has_tokens = False
        self._interval_s = interval_s
        self._due = 0.0 if interval_s < math.inf else math.inf
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        self._is_ready = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        """Add what a round brought."""
        self.has_tokens = True
        self._outputs += outputs
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due or any(output.finish_reason is not None for output in outputs):
            self._deliver()
        elif self._timer is None and self._due < math.inf:
            self._timer = loop.call_at(self._due + self._interval_s, self._deliver)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what was put before it."""
        self._error = error
        self._deliver()

    async def next(self) -> list[RequestOutput]:
        """Return the next outputs, oldest first; several rounds make several outputs of a sequence.

        Raises:
            Exception: the one that ended the stream.
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
        """Return what there is, due or not."""
        self.close()
        outputs, self._outputs = self._outputs, []
        return outputs

    def close(self) -> None:
        """Forget what was to be delivered later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deliver(self) -> None:
        self.close()
        self._is_ready.set()
