"""RemoteDrafter and RemoteVerifier: the engine's Drafter and Verifier over links to workers.

If the drafter fails, its round goes without drafts: the failure is counted by reason, and the drafter is not used again
until it replies to a ping. If the verifier fails, it raises `TargetError`.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from cluster.protocol.messages import (
    AnyReply,
    Drafts,
    MalformedMessageError,
    Ping,
    Pong,
    PrefixMissing,
    Propose,
    ProposeEntry,
    Verdicts,
    Verify,
    VerifyEntry,
)
from cluster.protocol.prefix_delta import Acknowledged
from cluster.protocol.validation import check_proposal, check_verdicts, with_drafts
from cluster.round_times import DraftTimes, RoundTimes, shape_of
from cluster.transport import ConnectionLostError, DeadlineError, Link, PeerGoneError, TransportError
from engine.errors import TargetError
from engine.protocols import NO_DRAFT, Draft, Overlap, ProposeRow, Verdict, VerifyRow

if TYPE_CHECKING:
    from engine.control.stats import RunAheadStats

logger = logging.getLogger(__name__)

_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 10.0
_PING_DEADLINE_S = 5.0
_REASONS: dict[type, str] = {DeadlineError: "timeout", MalformedMessageError: "malformed"}


@dataclass(slots=True)
class Calls:
    """Counters of the rounds that called a worker, since the start.

    Attributes:
        wait_s: seconds from the calls to their replies.
        compute_s: of these, the seconds that the worker computed; for a target, rank 0.
        num_hits, num_misses: rounds whose drafts a run-ahead worker had all prepared, and all other rounds.
    """

    wait_s: float = 0.0
    compute_s: float = 0.0
    num_hits: int = 0
    num_misses: int = 0

    def since(self, before: "Calls") -> "Calls":
        """Return the counts since `before`."""
        return Calls(*(getattr(self, entry.name) - getattr(before, entry.name) for entry in fields(self)))


class RemoteDrafter:
    """Proposes through a draft worker in another process; returns empty drafts if the worker fails.

    `fallbacks` counts rounds without drafts by reason: `absent` (no worker, or its connection is lost), `timeout`,
    `paused` (not used until it replies to a ping), `prefix_missing`, `malformed`, `failure` (reported by the worker).

    A worker that runs ahead is sent requests before they need drafts; see `Overlapping`.
    """

    def __init__(self, *, vocab_size: int = 0, timeout_s: float, overlaps: tuple[Overlap, ...] = ("none",)) -> None:
        """Make a drafter without a worker; `vocab_size` may be set later, before the first round."""
        self.fallbacks: Counter[str] = Counter()
        self.calls = Calls()
        self.unprepared: dict[str, int] = {}
        self.features: dict[str, int] = {}
        self.run_ahead: RunAheadStats | None = None
        self._num_hits = self._num_misses = 0
        self.overlaps: Collection[Overlap] = overlaps
        self.overlap: Overlap = "ahead" if "ahead" in overlaps else "none"
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
        if not any(self.overlap == "ahead" or row.num_draft_tokens for row in rows):
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
            self._begin_pause(link, reply)
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
        ahead = self.overlap == "ahead"
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

    def _begin_pause(self, link: Link, reason: str) -> None:
        if link is not self._link or self._pause is not None:
            return None
        if self._on_failure is not None:
            self.disconnect(reason)
            return self._on_failure(reason)
        if self._num_failures == 0:
            logger.warning("Draft worker failed (%s), decoding without drafts until it replies", reason)
        pause_s = min(_MIN_PAUSE_S * 2**self._num_failures, _MAX_PAUSE_S)
        self._num_failures += 1
        self._pause = asyncio.create_task(self._await_pong(link, pause_s), name="draft worker pause")
        return None

    async def replies(self) -> bool:
        """Return whether the worker replies to a ping."""
        try:
            return self._link is not None and await self._ping(self._link)
        except TransportError:
            return False

    async def _ping(self, link: Link) -> bool:
        return isinstance(await link.call(Ping(next(self._rounds), link.version, _PING_DEADLINE_S, [])), Pong)

    async def _await_pong(self, link: Link, pause_s: float) -> None:
        has_replied = False
        while not has_replied:
            await asyncio.sleep(pause_s)
            try:
                has_replied = await self._ping(link)
            except (ConnectionLostError, DeadlineError):
                continue
            except PeerGoneError:
                return  # the worker is dead; `disconnect` follows
        self._pause = None
        logger.info("Draft worker replies again")

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None


class RemoteVerifier:
    """Verifies through the target's ranks: all get the same requests in the same order, and rank 0 replies.

    A round may be sent before the one before it has ended; the ranks compute them in order.
    """

    def __init__(self, *, vocab_size: int = 0, timeout_s: float) -> None:
        """Make a verifier without ranks; `timeout_s` is the longest that a round may take; see `RoundTimes`."""
        self.calls = Calls()
        self.unprepared: dict[str, int] = {}
        self.vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._links: list[Link] = []
        self._lost = "it has not started"
        self._round = 0
        self._acknowledged = Acknowledged()
        self._times = RoundTimes()
        self._sending = asyncio.Lock()
        self._due_s: dict[int, float] = {}
        """By round: how long each round in flight may take by itself."""
        self._replied_s = 0.0

    @property
    def is_available(self) -> bool:
        """Whether ranks are connected."""
        return bool(self._links)

    def connect(self, links: Sequence[Link]) -> None:
        """Use new ranks, rank 0 first, which hold no prefixes yet.

        Their links must call `disconnect` when a connection breaks. Ranks above 0 never reply, so no call would notice
        that a request to them was lost; all ranks must be restarted then.
        """
        self._links = list(links)
        self._due_s = {}
        self._round = 0
        self._acknowledged = Acknowledged()
        self._times = RoundTimes()

    def disconnect(self, reason: str) -> None:
        """Fail the current round and all later ones with TargetError, until the next `connect`."""
        links, self._links, self._lost = self._links, [], reason
        for link in links:
            link.close(reason)

    def verify(self, rows: Sequence[VerifyRow]) -> Coroutine[Any, Any, list[Verdict]]:
        """Return one verdict per row; it is empty if the row's request ends before the row is sent.

        Raises TargetError if a rank is lost or late, or sent an invalid reply; all ranks must be restarted.
        """
        self._acknowledged.expect(rows)
        return self._verify(self._links, rows)

    async def _verify(self, links: list[Link], rows: Sequence[VerifyRow]) -> list[Verdict]:
        try:
            sent, reply = await self._exchange(links, rows)
            if isinstance(reply, PrefixMissing):
                self._acknowledged.forget(reply.request_ids)
                sent, reply = await self._exchange(links, rows)
            if not isinstance(reply, Verdicts):
                raise MalformedMessageError(f"it replied {reply}")
            verdicts = with_drafts(reply.verdicts, sent)
            check_verdicts(verdicts, sent, self.vocab_size)
        except (TransportError, MalformedMessageError) as error:
            if links is self._links:
                # If not all ranks finished the round, their next all-reduces would not match.
                self.disconnect(str(error))
            raise TargetError(f"the target did not finish a round: {error}") from error
        self.unprepared = reply.unprepared
        self.calls.compute_s += reply.compute_s
        by_row = {id(row): verdict for row, verdict in zip(sent, verdicts, strict=True)}
        return [by_row.get(id(row), Verdict()) for row in rows]

    def release(self, request_id: str) -> None:
        """Release a request that has ended; the ranks are told with the next request."""
        self._acknowledged.release(request_id)

    async def _exchange(self, links: list[Link], rows: Sequence[VerifyRow]) -> tuple[Sequence[VerifyRow], AnyReply]:
        """Send the rows whose requests have not ended; return those, and the reply."""
        async with self._sending:  # or a rank could get two rounds in the wrong order
            if not links or links is not self._links:
                raise PeerGoneError(self._lost)
            # A round that was sent before this one may have the blocks of a request that has ended.
            rows = [row for row in rows if self._acknowledged.awaits(row.request)]
            if not rows:
                return rows, Verdicts(self._round, links[0].version, 0.0, [], self.unprepared)
            self._round += 1
            deltas, released = self._acknowledged.deltas(rows)
            # Ranks miss no message. Sent twice, it could end a request that has begun under the same id.
            self._acknowledged.acknowledge(released, ())
            entries = [
                VerifyEntry(delta, row.start, row.length, _judged(row.draft), row.state)
                for delta, row in zip(deltas, rows, strict=True)
            ]
            shape = None if any(delta.params is not None for delta in deltas) else shape_of(rows)
            own_s, earlier_s = self._times.deadline_s(shape, self._timeout_s), sum(self._due_s.values())
            request = Verify(self._round, links[0].version, own_s + earlier_s, released, entries)
            self._due_s[request.round] = own_s
            started = time.perf_counter()
            try:
                for link in links[1:]:
                    await link.post(request)
                answer = await links[0].begin(request)
            except BaseException:
                self._due_s.pop(request.round, None)
                raise
        try:
            reply = await answer
        finally:
            self._due_s.pop(request.round, None)
        started, self._replied_s = max(started, self._replied_s), time.perf_counter()
        self.calls.wait_s += self._replied_s - started
        if links is not self._links:
            raise PeerGoneError(self._lost)
        if isinstance(reply, Verdicts):
            self._times.observe(shape, self._replied_s - started)
            self._acknowledged.acknowledge((), rows)
        return rows, reply


def _judged(draft: Draft) -> Draft:
    """Return what the target needs of a draft."""
    if draft.confidences is None:
        return draft
    # `dataclasses.replace` would take three times as long.
    return Draft(draft.token_ids, draft.parents, draft.top_ids, draft.top_probs, 0, draft.is_predicted)
