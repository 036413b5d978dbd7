"""Delivery: a Router's messages to one Ingress, with one write per round. Stream: one request's unsent outputs."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from cluster.transport import InboxAddress, Outbox
from deployments.wire import HEARTBEAT_S, MAX_MOVABLE, End, Generation, Message, Outputs, Report, encode
from engine.errors import TargetError
from engine.requests.output import RequestOutput


class Stream:
    """The unsent outputs of one request.

    First and last tokens are sent at once. Others wait `interval_s` to twice that: sending takes longer than a short
    round.
    """

    def __init__(self, request: Generation, send: Callable[[Outputs], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.request = request
        self.started = time.monotonic()
        self.has_tokens = bool(request.output_token_ids)  # perhaps from another Router
        self.unfinished: set[str] = set()  # sequences in the engine
        self.ended: asyncio.Future[None] = (
            self._loop.create_future()
        )  # when all sequences have finished, or with an error
        self._send = send
        self._due = self._loop.time() + request.interval_s if request.gathers_first else 0.0
        self._outputs: list[RequestOutput] = []
        self._timer: asyncio.TimerHandle | None = None
        self._lengths = Counter(
            {f"{request.request_id}-{choice}": len(ids) for choice, ids in request.output_token_ids.items()}
        )

    @property
    def longest(self) -> int:
        """The tokens of the longest choice, including tokens from other Routers."""
        return max(self._lengths.values(), default=0)

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        self.has_tokens = True
        self._outputs += outputs
        has_last = False
        for output in outputs:
            self._lengths[output.request_id] += len(output.token_ids)
            if output.finish_reason is not None:
                self.unfinished.discard(output.request_id)
                has_last = True
        if has_last or self._loop.time() >= self._due:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due + self.request.interval_s, self.flush)
        if not self.unfinished and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the outputs so far."""
        self.flush()
        if not self.ended.done():
            self.ended.set_exception(error)

    def flush(self) -> None:
        self.close()
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._due = self._loop.time() + self.request.interval_s
            self._send(Outputs(self.request.request_id, outputs))

    def close(self) -> None:
        """Stop the timer of gathered outputs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Delivery(Outbox):
    """The connection to one Ingress, and its streams; Serve's handle would pass all outputs through several threads."""

    def __init__(self, address: InboxAddress) -> None:
        super().__init__(address, self._fail_streams)
        self.has_requested = False  # has the Ingress ever sent a request?
        self._streams: dict[Stream, None] = {}
        self._last_report: Report | None = None
        self._reported_at = 0.0

    @property
    def num_sequences(self) -> int:
        """The sequences of open requests, finished sequences too, as the Ingress counts them."""
        return sum(stream.request.num_unfinished for stream in self._streams)

    def movable(self, unstarted_ids: frozenset[str]) -> tuple[str, ...]:
        """Return this Ingress's requests whose sequences are all in `unstarted_ids`, newest first."""
        newest_first = (
            stream.request.request_id
            for stream in reversed(self._streams)
            if stream.unfinished and stream.unfinished <= unstarted_ids
        )
        return tuple(islice(newest_first, MAX_MOVABLE)) if unstarted_ids else ()

    @contextmanager
    def stream(self, request: Generation) -> Iterator[Stream]:
        """Open the stream of a request; it fails if the connection breaks."""
        stream = Stream(request, self.deliver)
        self.has_requested = True
        self._streams[stream] = None
        try:
            yield stream
        finally:
            del self._streams[stream]

    def end(self, end: End) -> None:
        """Send the end of a request after its outputs; raise TargetError if the Ingress cannot be reached."""
        if self.is_lost:
            raise TargetError("the Ingress cannot be reached")
        self.deliver(end)

    def report(self, report: Report) -> None:
        """Send a report if it is new or the last one is old, unless the Ingress reads too slowly."""
        now = time.monotonic()
        if self.has_room and (report != self._last_report or now - self._reported_at >= HEARTBEAT_S):
            self._last_report, self._reported_at = report, now
            self.deliver(report)

    def deliver(self, message: Message) -> None:
        """Send a message together with the others of this turn of the event loop."""
        self.post(encode(message))

    def _fail_streams(self, reason: str) -> None:
        for stream in self._streams:
            stream.fail(TargetError(f"the Ingress cannot be reached: {reason}"))
