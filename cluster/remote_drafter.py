"""RemoteDrafter: the engine's Drafter over a link to a draft worker."""

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
    from engine.stats.drafts import RunAheadStats

logger = logging.getLogger(__name__)

_PING_DEADLINE_S = 5.0
_REASONS: dict[type, str] = {DeadlineError: "timeout", MalformedMessageError: "malformed"}


class RemoteDrafter:
    """Proposes through a draft worker; if it fails, drafts are empty until the next `connect`.

    `fallbacks` counts rounds without drafts by reason: `absent` (no worker, or its connection is lost), `timeout`,
    `prefix_missing`, `malformed`, `failure` (reported by the worker).
    """

    def __init__(self, *, vocab_size: int = 0, timeout_s: float) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.calls = Calls()
        self.unprepared: dict[str, int] = {}
        self.features: dict[str, int] = {}
        self.learning: dict[str, float] = {}
        self.run_ahead: RunAheadStats | None = None
        self._num_hits = self._num_misses = 0
        self.vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._rounds = itertools.count(1)
        self._acknowledged = Acknowledged()
        self._times = DraftTimes()
        self._on_failure: Callable[[str], None]
        self.is_available = False

    def connect(self, link: Link, on_failure: Callable[[str], None]) -> None:
        """Use a worker until it fails; `on_failure` then gets the reason. Behind a new link it holds no prefixes."""
        if link is not self._link:
            self._link, self._times = link, DraftTimes()
            self._num_hits = self._num_misses = 0
            self._acknowledged = Acknowledged()
        self.is_available, self._on_failure = True, on_failure

    def disconnect(self) -> None:
        self.is_available = False

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a draft per row; all are empty if the worker is absent, late or sends an invalid reply."""
        if not any(row.runs_ahead or row.num_draft_tokens for row in rows):
            return [NO_DRAFT] * len(rows)
        link = self._link
        if link is None or not self.is_available:
            self.fallbacks["absent"] += 1
            return [NO_DRAFT] * len(rows)
        started = time.perf_counter()
        reply = await self._request(link, rows)
        seconds = time.perf_counter() - started
        self.calls.wait_s += seconds
        if isinstance(reply, str):
            self.fallbacks[reply] += 1
            if link is self._link and self.is_available:
                self.disconnect()
                self._on_failure(reply)
            return [NO_DRAFT] * len(rows)
        self._times.observe((), seconds)
        self.calls.compute_s += reply.compute_s
        self.unprepared, self.features, self.learning = reply.unprepared, reply.features, reply.learning
        if reply.run_ahead is not None:
            self._observe(reply.run_ahead)
        return reply.drafts

    def release(self, request_id: str) -> None:
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
        pairs = zip(deltas, rows, strict=True)
        entries = [ProposeEntry(delta, row.num_draft_tokens, row.draft_index) for delta, row in pairs]
        ahead = any(row.runs_ahead for row in rows)
        # Whole texts take the worker longer than the few tokens of other rounds.
        is_usual = not any(delta.params is not None for delta in deltas)
        deadline_s = self._times.deadline_s((), self._timeout_s) if is_usual else self._timeout_s
        reply = await link.call(Propose(next(self._rounds), link.version, deadline_s, released, entries, ahead))
        if link is not self._link:
            raise PeerGoneError("the draft worker was replaced during the round")
        self._acknowledged.acknowledge(released, rows if isinstance(reply, Drafts) else ())
        return reply

    def _observe(self, stats: "RunAheadStats") -> None:
        num_misses = sum(stats.misses.values())
        if num_misses > self._num_misses:
            self.calls.num_misses += 1
        elif stats.hits > self._num_hits:
            self.calls.num_hits += 1
        self.run_ahead, self._num_hits, self._num_misses = stats, stats.hits, num_misses

    async def replies(self, link: Link) -> bool:
        """Return whether a worker replies to a ping, after all earlier requests."""
        try:
            return isinstance(await link.call(Ping(next(self._rounds), link.version, _PING_DEADLINE_S, [])), Pong)
        except TransportError:
            return False
