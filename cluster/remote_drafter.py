"""RemoteDrafter: the engine's Drafter over a link to a draft worker.

If the worker fails, the round goes without drafts: the failure is counted by reason, and the worker is not used again
until it replies to a ping.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cluster.protocol.messages import (
    AnyReply,
    Drafts,
    MalformedMessageError,
    Ping,
    Pong,
    PrefixMissing,
    Propose,
    ProposeEntry,
)
from cluster.protocol.prefix_delta import Acknowledged
from cluster.protocol.validation import check_proposal
from cluster.round_times import Calls, DraftTimes
from cluster.transport import DeadlineError, Link, PeerGoneError, TransportError
from engine.protocols import NO_DRAFT, Draft, ProposeRow

if TYPE_CHECKING:
    from engine.control.stats import RunAheadStats

logger = logging.getLogger(__name__)

_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 10.0
_PING_DEADLINE_S = 5.0
_REASONS: dict[type, str] = {DeadlineError: "timeout", MalformedMessageError: "malformed"}


class RemoteDrafter:
    """Proposes through a draft worker in another process; returns empty drafts if the worker fails.

    `fallbacks` counts rounds without drafts by reason: `absent` (no worker, or its connection is lost), `timeout`,
    `paused` (not used until it replies to a ping), `prefix_missing`, `malformed`, `failure` (reported by the worker).

    A worker that runs ahead is sent requests before they need drafts.
    """

    def __init__(self, *, vocab_size: int = 0, timeout_s: float) -> None:
        """Make a drafter without a worker; `vocab_size` may be set later, before the first round."""
        self.fallbacks: Counter[str] = Counter()
        self.calls = Calls()
        self.unprepared: dict[str, int] = {}
        self.features: dict[str, int] = {}
        self.run_ahead: RunAheadStats | None = None
        self._num_hits = self._num_misses = 0
        self.vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._rounds = itertools.count(1)
        self._acknowledged = Acknowledged()
        self._times = DraftTimes()
        self._on_failure: Callable[[str], None] | None = None
        self._pause: asyncio.Task[None] | None = None
        self._num_failures = 0

    @property
    def is_available(self) -> bool:
        """Whether the next round will request drafts."""
        return self._link is not None and self._pause is None

    def connect(self, link: Link, on_failure: Callable[[str], None] | None = None) -> None:
        """Use a new worker, which holds no prefixes yet.

        With `on_failure`, a failure is not followed by pings: the worker is not used again, and this gets the reason.
        """
        self._end_pause()
        self._link, self._on_failure, self._times = link, on_failure, DraftTimes()
        self._num_failures = self._num_hits = self._num_misses = 0
        self._acknowledged = Acknowledged()
        logger.info("Draft worker connected")

    def disconnect(self, reason: str) -> None:
        """Return empty drafts until the next `connect`."""
        if self._link is not None:
            self._link.close(reason)
            self._link = None
        self._end_pause()

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return one draft per row; all are empty if the worker is absent, late or sends an invalid reply."""
        if not any(row.runs_ahead or row.num_draft_tokens for row in rows):
            return [NO_DRAFT] * len(rows)
        link = self._link
        if link is None or self._pause is not None:
            self.fallbacks["absent" if link is None else "paused"] += 1
            return [NO_DRAFT] * len(rows)
        started = time.perf_counter()
        reply = await self._request(link, rows)
        seconds = time.perf_counter() - started
        self.calls.wait_s += seconds
        if isinstance(reply, str):
            self.fallbacks[reply] += 1
            self._stop_using(link, reply)
            return [NO_DRAFT] * len(rows)
        self._num_failures = 0
        self._times.observe(seconds)
        self.calls.compute_s += reply.compute_s
        self.unprepared, self.features = reply.unprepared, reply.features
        if reply.run_ahead is not None:
            self._observe(reply.run_ahead)
        return reply.drafts

    def release(self, request_id: str) -> None:
        """Release a request that has ended; the worker is told with the next request."""
        self._acknowledged.release(request_id)

    async def _request(self, link: Link, rows: Sequence[ProposeRow]) -> Drafts | str:
        """Return the worker's drafts, or the reason why there are none."""
        try:
            reply = await self._propose(link, rows)
            if isinstance(reply, PrefixMissing):
                self._acknowledged.forget(reply.request_ids)
                reply = await self._propose(link, rows)
            if isinstance(reply, Drafts):
                check_proposal(reply.drafts, rows, self.vocab_size)
                return reply
        except (TransportError, MalformedMessageError) as error:
            logger.debug("No drafts: %s", error)
            return _REASONS.get(type(error), "absent")
        logger.debug("The draft worker replied %s", reply)
        return "prefix_missing" if isinstance(reply, PrefixMissing) else "failure"

    async def _propose(self, link: Link, rows: Sequence[ProposeRow]) -> AnyReply:
        deltas, released = self._acknowledged.deltas(rows)
        entries = [ProposeEntry(delta, row.num_draft_tokens) for delta, row in zip(deltas, rows, strict=True)]
        ahead = any(row.runs_ahead for row in rows)
        # Whole texts take the worker longer than the few tokens of other rounds.
        is_usual = not any(delta.params is not None for delta in deltas)
        deadline_s = self._times.deadline_s(self._timeout_s) if is_usual else self._timeout_s
        reply = await link.call(Propose(next(self._rounds), link.version, deadline_s, released, entries, ahead))
        if link is not self._link:
            raise PeerGoneError("the draft worker was replaced during the round")
        self._acknowledged.acknowledge(released, rows if isinstance(reply, Drafts) else ())
        return reply

    def _observe(self, stats: "RunAheadStats") -> None:
        """Record the growth of the worker's counters in this round."""
        num_misses = sum(stats.misses.values())
        if num_misses > self._num_misses:
            self.calls.num_misses += 1
        elif stats.hits > self._num_hits:
            self.calls.num_hits += 1
        self.run_ahead, self._num_hits, self._num_misses = stats, stats.hits, num_misses

    def _stop_using(self, link: Link, reason: str) -> None:
        if link is not self._link or self._pause is not None:
            return
        if self._on_failure is not None:
            self.disconnect(reason)
            self._on_failure(reason)
            return
        if self._num_failures == 0:
            logger.warning("Draft worker failed (%s), decoding without drafts until it replies", reason)
        pause_s = min(_MIN_PAUSE_S * 2**self._num_failures, _MAX_PAUSE_S)
        self._num_failures += 1
        self._pause = asyncio.create_task(self._await_reply(pause_s), name="draft worker pause")

    async def replies(self) -> bool:
        """Return whether the worker replies to a ping."""
        if (link := self._link) is None:
            return False
        try:
            return isinstance(await link.call(Ping(next(self._rounds), link.version, _PING_DEADLINE_S, [])), Pong)
        except TransportError:
            return False

    async def _await_reply(self, pause_s: float) -> None:
        has_replied = False
        while not has_replied:
            await asyncio.sleep(pause_s)
            has_replied = await self.replies()
        self._pause = None
        logger.info("Draft worker replies again")

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
