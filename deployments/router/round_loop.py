"""RoundLoop: runs the engine's rounds while there is work, sends tokens to streams, and restarts a lost target."""

import asyncio
import logging
import time
from collections import defaultdict

from cluster.group import SpeculationGroup
from deployments.observe.metrics import RouterMetrics
from deployments.router.delivery import Stream
from deployments.wire import retry_after_s
from engine.engine import Engine
from engine.errors import QueueFullError, RequestError, TargetError

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

RECOVERY_PAUSE_S = 1.0
MAX_RECOVERIES = 3  # target restarts without a finished round between them, before the replica is replaced
HALF_LIFE_S = 10.0  # of a measurement of the drain rate, in seconds of work


class RoundLoop:
    """Runs one engine over one group until the replica ends; one task owns the engine."""

    def __init__(
        self, engine: Engine, group: SpeculationGroup, metrics: RouterMetrics, *, round_timeout_s: float
    ) -> None:
        self._engine = engine
        self._group = group
        self._metrics = metrics
        self._round_timeout_s = round_timeout_s
        self._streams: dict[str, Stream] = {}  # by sequence id; the sequences of a request share a stream
        self.drain_rate = DrainRate()
        self._wake = asyncio.Event()
        self._lost: TargetError | None = None
        self._delivery: asyncio.Task[None] | None = None  # of earlier rounds' outputs; None until a round was sent
        self._num_failures = 0
        self._last_progress = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="rounds")
        self._task.add_done_callback(self._fail_streams)

    async def generate(self, stream: Stream) -> None:
        """Admit a request, and return when its last tokens have been sent; raise the error that ends it earlier."""
        self.check()
        self._admit(stream)
        timeout_s = stream.request.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await stream.ended
            self._metrics.longest.observe(stream.longest)
        except TimeoutError:
            stream.flush()
            raise TimeoutError(f"the request took longer than {timeout_s:g} s") from None
        finally:
            stream.close()
            self._abort(stream)

    def report_loss(self, error: TargetError) -> None:
        """Restart the target after a loss while no round runs; a running round detects losses itself."""
        self._lost = error
        self._wake.set()

    def check(self) -> None:
        """Raise TargetError if the loop has ended, or has work but no progress, so that the replica is replaced."""
        if self._task.done():
            raise TargetError("the round loop has ended")
        if self._num_failures > MAX_RECOVERIES:
            raise TargetError(f"the target failed {self._num_failures} times in a row")
        idle_s = time.monotonic() - self._last_progress
        if self._engine.has_work and idle_s > self._round_timeout_s:
            raise TargetError(f"no round was finished for {idle_s:.0f} s, although there is work")

    async def stop(self) -> None:
        """End the loop; open streams get an error."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._engine.reset()

    def _abort(self, stream: Stream) -> None:
        for sequence_id in stream.unfinished:
            del self._streams[sequence_id]
            self._engine.abort(sequence_id)
            self._metrics.observe_finished("abort", time.monotonic() - stream.started)

    def _admit(self, stream: Stream) -> None:
        """Add all sequences of a request, or none."""
        if not self._engine.has_work:
            self._last_progress = time.monotonic()
        request, added = stream.request, []
        try:
            for sequence in request.sequences():
                self._engine.add(
                    sequence.request_id,
                    sequence.prompt_token_ids,
                    sequence.params,
                    cache_salt=request.cache_salt,
                    output_token_ids=sequence.output_token_ids,
                    predicted_token_ids=sequence.predicted_token_ids,
                    priority=request.priority,
                    owner=request.owner,
                )
                added.append(sequence.request_id)
        except Exception as error:
            for sequence_id in added:
                self._engine.abort(sequence_id)
            if isinstance(error, QueueFullError):
                error.retry_after_s = retry_after_s(self._engine.num_requests, self.drain_rate.per_s)
            raise
        stream.unfinished.update(added)
        self._streams |= dict.fromkeys(added, stream)
        self._metrics.observe_request(request)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            if not self._engine.has_work and self._lost is None:
                self._wake.clear()
                await self._wake.wait()
            if self._lost is not None:
                lost, self._lost = self._lost, None
                self._deliver()
                await self._recover(lost)
                continue
            started = time.perf_counter()
            calls = self._metrics.calls()
            try:
                is_prefill = await self._engine.run_round(meanwhile=self._begin_delivery)
            except TargetError as error:
                await self._end_delivery()
                await self._recover(error)
                continue
            self._num_failures = 0
            self._last_progress = time.monotonic()
            stepped = time.perf_counter()
            if is_prefill or not self._engine.has_work:  # first and last tokens do not wait for the next round
                self._deliver()
            # Already done, unless the workers answered at once; then other tasks run here, too.
            await self._end_delivery()
            now = time.perf_counter()
            self._metrics.observe_round(calls, round_s=now - started, delivery_s=now - stepped, is_prefill=is_prefill)

    def _begin_delivery(self) -> None:
        """Deliver earlier rounds' outputs once this round waits for a worker, while the target computes."""

        async def deliver() -> None:
            self._deliver()

        self._delivery = asyncio.create_task(deliver(), name="delivery")

    async def _end_delivery(self) -> None:
        if self._delivery is not None:
            await self._delivery

    def _deliver(self) -> None:
        outputs, now = self._engine.take_outputs(), time.monotonic()
        num_finished = sum(output.finish_reason is not None for output in outputs)
        self.drain_rate.observe(num_finished, now, has_work=self._engine.has_work)
        rounds, failed = defaultdict(list), {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its client left during the round
            if output.finish_reason == "error":
                failed[stream] = RequestError(str(output.stop_reason), "structured_outputs")
                continue
            rounds[stream].append(output)
            if output.finish_reason is not None:
                del self._streams[output.request_id]
                self._metrics.observe_finished(output.finish_reason, now - stream.started)
        for stream, stream_outputs in rounds.items():
            if not stream.has_tokens:
                self._metrics.first_token_s.observe(now - stream.started)
            stream.put(stream_outputs)
        for stream, error in failed.items():
            stream.fail(error)

    async def _recover(self, error: TargetError) -> None:
        """Restart the target and continue from the committed tokens. It resets the engine, so no round may run."""
        self._num_failures += 1
        logger.warning("target lost (%s); recovery %d of %d", error, self._num_failures, MAX_RECOVERIES)
        if self._num_failures > MAX_RECOVERIES:
            self._fail_all(TargetError(f"the target failed {self._num_failures} times in a row: {error}"))
            return
        try:
            await self._group.recover()
        except TargetError as failure:
            logger.warning("recovery failed: %s", failure)
            await asyncio.sleep(RECOVERY_PAUSE_S * self._num_failures)
            return
        self._lost = None  # a loss that was reported meanwhile concerns the old ranks
        self._engine.reset()
        self._metrics.num_recoveries += 1
        self._last_progress = time.monotonic()
        logger.info("the target is running again; %d requests resume", self._engine.num_requests)

    def _fail_all(self, error: Exception) -> None:
        for sequence_id in self._streams:
            self._engine.abort(sequence_id)
        for stream in set(self._streams.values()):
            stream.fail(error)

    def _fail_streams(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the round loop ended", exc_info=error)
        self._fail_all(TargetError("the replica is shutting down" if task.cancelled() else "the round loop ended"))


class DrainRate:
    """Requests finished per second of work; the last seconds count most."""

    def __init__(self) -> None:
        # One request in one second, until something has been measured.
        self._num_finished = 1.0
        self._seconds = 1.0
        self._last: float | None = None

    def observe(self, num_finished: int, now: float, *, has_work: bool) -> None:
        """Count requests that finished in a round; the time up to now counts if there was work."""
        if self._last is not None:
            elapsed = now - self._last
            decay = 0.5 ** (elapsed / HALF_LIFE_S)
            self._num_finished = self._num_finished * decay + num_finished
            self._seconds = self._seconds * decay + elapsed
        self._last = now if has_work else None

    @property
    def per_s(self) -> float:
        return self._num_finished / self._seconds
