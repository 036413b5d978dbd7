"""RoundLoop: runs the engine's rounds while there is work, delivers the tokens, and restarts a lost target.

One task owns the engine. A request has one stream, and an entry in `_streams` for each of its sequences. When its
generator is closed, for whatever reason, its sequences leave the engine at once.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from cluster.remote import Calls
from deployments.metrics import RoundTimes, RouterMetrics
from deployments.router.drain_rate import DrainRate, retry_after_s
from deployments.router.generation import Generation, WithdrawnError, choice_index
from deployments.router.stream import Stream
from deployments.router.waiting import WaitingRequests
from engine.engine import Engine
from engine.errors import QueueFullError, TargetError
from engine.sequence import RequestOutput

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

RECOVERY_PAUSE_S = 1.0


class Recoverable(Protocol):
    """What the loop calls on a speculation group."""

    async def recover(self) -> None:
        """Restart lost target ranks.

        Raises:
            TargetError: the restart failed; another one may succeed.
        """
        ...


class RoundLoop:
    """Drives one engine over one group, for as long as the replica lives."""

    def __init__(
        self, engine: Engine, group: Recoverable, metrics: RouterMetrics, *, max_recoveries: int, round_timeout_s: float
    ) -> None:
        self._engine = engine
        self._group = group
        self._metrics = metrics
        self._max_recoveries = max_recoveries
        self._round_timeout_s = round_timeout_s
        self._streams: dict[str, Stream] = {}
        self.drain_rate = DrainRate()
        self.waiting = WaitingRequests(engine)
        self._wake = asyncio.Event()
        self._lost: TargetError | None = None
        self._num_failures = 0
        self._last_progress = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="rounds")
        self._task.add_done_callback(self._fail_streams)

    async def generate(self, request: Generation, sender: Any = None) -> AsyncGenerator[list[RequestOutput], None]:
        """Admit a request and yield its tokens, every `interval_s` and at most once per round.

        Args:
            sender: who may have the request withdrawn.

        Raises:
            RequestError: it does not fit the model; nothing was queued.
            QueueFullError: too many requests wait already; nothing was queued.
            TargetError: the target could not be restarted.
            TimeoutError: the request's deadline has passed.
            WithdrawnError: it was withdrawn.
        """
        self.check()
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        stream = Stream(
            request.interval_s, gathers_first=request.gathers_first, has_tokens=bool(request.output_token_ids)
        )
        unfinished = self._admit(request, stream)
        sequence_ids = frozenset(unfinished)
        lengths = Counter({choice: len(token_ids) for choice, token_ids in request.output_token_ids.items()})
        self.waiting.add(stream, sequence_ids, sender, request.rest_s)
        is_late = False
        try:
            while unfinished and not is_late:
                try:
                    async with asyncio.timeout_at(deadline):
                        outputs = await stream.next()
                except TimeoutError:
                    is_late, outputs = True, stream.take()
                for output in outputs:
                    lengths[choice_index(output.request_id)] += len(output.token_ids)
                    if output.finish_reason is not None:
                        unfinished.discard(output.request_id)
                        self._metrics.observe_finished(output.finish_reason, time.monotonic() - stream.started)
                if is_late:
                    self._end(stream, unfinished)
                if outputs:
                    yield outputs
            if not unfinished:
                self._metrics.requests.observe_longest(max(lengths.values(), default=0))
            elif is_late:
                raise TimeoutError(f"the request took longer than {request.timeout_s:g} s")
        except WithdrawnError:
            unfinished.clear()
            raise
        finally:
            self.waiting.remove(sequence_ids)
            if not is_late:
                self._end(stream, unfinished)

    def withdraw(self, sender: Any, limit: int) -> int:
        """Give back requests of a sender of which nothing has been computed, newest first.

        Returns:
            The number of their sequences, at most `limit`.
        """
        num_withdrawn = 0
        for stream, sequence_ids in self.waiting.choose(sender, limit):
            num_withdrawn += len(sequence_ids)
            for sequence_id in sequence_ids:
                del self._streams[sequence_id]
                self._engine.abort(sequence_id)
            stream.fail(WithdrawnError("another Router has less to do"))
        return num_withdrawn

    def report_loss(self, error: TargetError) -> None:
        """Restart the target; for losses while no round runs, since a running round detects them itself."""
        self._lost = error
        self._wake.set()

    def check(self) -> None:
        """Raise unless rounds are being finished while there is work.

        Raises:
            TargetError: the loop has ended or makes no progress; the replica should be replaced.
        """
        if self._task.done():
            raise TargetError("the round loop has ended")
        if self._num_failures > self._max_recoveries:
            raise TargetError(f"the target failed {self._num_failures} times in a row")
        idle_s = time.monotonic() - self._last_progress
        if self._engine.has_work and idle_s > self._round_timeout_s:
            raise TargetError(f"no round was finished for {idle_s:.0f} s, although there is work")

    async def stop(self) -> None:
        """End the loop; streams still open get an error."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def _end(self, stream: Stream, unfinished: set[str]) -> None:
        """Abort the unfinished sequences of a request."""
        stream.close()
        for request_id in unfinished:
            # The sequence may have finished in a round that was not delivered; then it is gone already.
            self._streams.pop(request_id, None)
            self._engine.abort(request_id)
            self._metrics.observe_finished("abort", time.monotonic() - stream.started)

    def _admit(self, request: Generation, stream: Stream) -> set[str]:
        """Add all sequences of a request, or none."""
        if not self._engine.has_work:
            self._last_progress = time.monotonic()
        added: set[str] = set()
        try:
            for sequence in request.sequences():
                self._engine.add(
                    sequence.request_id,
                    sequence.prompt_token_ids,
                    sequence.params,
                    cache_salt=request.cache_salt,
                    output_token_ids=sequence.output_token_ids,
                )
                added.add(sequence.request_id)
                self._streams[sequence.request_id] = stream
        except Exception as error:
            for request_id in added:
                del self._streams[request_id]
                self._engine.abort(request_id)
            if isinstance(error, QueueFullError):
                num_requests = self._engine.num_running + self._engine.num_waiting
                error.retry_after_s = retry_after_s(num_requests, self.drain_rate.per_s)
            raise
        self._metrics.requests.observe_request(request.params)
        self._wake.set()
        return added

    async def _run(self) -> None:
        while True:
            if not self._engine.has_work and self._lost is None:
                self._wake.clear()
                await self._wake.wait()
            if self._lost is not None:
                lost, self._lost = self._lost, None
                await self._recover(lost)
                continue
            started = time.perf_counter()
            called = self._calls()
            is_prefill = self._engine.has_prompts
            other_tasks_ran = asyncio.Event()
            asyncio.get_running_loop().call_soon(other_tasks_ran.set)
            try:
                outputs = await self._engine.step()
            except TargetError as error:
                await self._recover(error)
                continue
            self._num_failures = 0
            self._last_progress = time.monotonic()
            num_finished = sum(output.finish_reason is not None for output in outputs)
            self.drain_rate.observe(num_finished, self._last_progress, has_work=self._engine.has_work)
            stepped = time.perf_counter()
            self._deliver(outputs)
            # Other tasks run while the workers compute. Where workers answer without waiting, let the tasks run here.
            await other_tasks_ran.wait()
            now = time.perf_counter()
            draft, target = (after.since(before) for before, after in zip(called, self._calls(), strict=True))
            times = RoundTimes(now - started, draft, target, delivery_s=now - stepped)
            self._metrics.observe_round(times, is_prefill=is_prefill)

    def _calls(self) -> tuple[Calls, Calls]:
        """Return what was counted so far of the calls to the draft worker and to the target; 0 for roles in process."""
        roles = self._engine.drafter, self._engine.verifier
        draft, target = (replace(getattr(role, "calls", Calls())) for role in roles)
        return draft, target

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Give each stream its outputs of a round."""
        rounds: dict[Stream, list[RequestOutput]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its client left during the round
            rounds.setdefault(stream, []).append(output)
            if output.finish_reason is not None:
                del self._streams[output.request_id]
        for stream, stream_outputs in rounds.items():
            if not stream.has_tokens:
                self._metrics.observe_first_token(time.monotonic() - stream.started)
            stream.put(stream_outputs)

    async def _recover(self, error: TargetError) -> None:
        """Restart the target and continue from the committed tokens; give up after too many restarts in a row.

        Only the loop's own task calls this: the engine must not be reset during a step.
        """
        self._num_failures += 1
        logger.warning("target lost (%s); recovery %d of %d", error, self._num_failures, self._max_recoveries)
        if self._num_failures > self._max_recoveries:
            self._abort_all(TargetError(f"the target failed {self._num_failures} times in a row: {error}"))
            return
        try:
            await self._group.recover()
        except TargetError as failure:
            logger.warning("recovery failed: %s", failure)
            await asyncio.sleep(RECOVERY_PAUSE_S * self._num_failures)
            return
        self._lost = None  # what was reported meanwhile was about the old ranks
        self._engine.reset()
        self._metrics.observe_recovery()
        self._last_progress = time.monotonic()
        logger.info("the target is running again; %d requests resume", self._engine.num_waiting)

    def _abort_all(self, error: Exception) -> None:
        for request_id in self._streams:
            self._engine.abort(request_id)
        for stream in set(self._streams.values()):
            stream.fail(error)

    def _fail_streams(self, task: asyncio.Task[None]) -> None:
        """Fail every open stream when the loop ends, even if a bug ended it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the round loop ended", exc_info=error)
        self._abort_all(TargetError("the replica is shutting down" if task.cancelled() else "the round loop ended"))
