"""RemoteVerifier: the engine's Verifier over links to the target's ranks; if a rank fails, it raises `TargetError`."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from cluster.protocol.messages import AnyReply, MalformedMessageError, PrefixMissing, Verdicts, Verify, VerifyEntry
from cluster.protocol.prefix_delta import Acknowledged
from cluster.protocol.validation import check_verdicts, with_drafts
from cluster.round_times import Calls, RoundTimes, shape_of
from cluster.transport import Link, PeerGoneError, TransportError
from engine.errors import TargetError
from engine.protocols import Verdict, VerifyRow


class RemoteVerifier:
    """Sends all ranks the same rounds in the same order; rank 0 replies. A round may be sent before the last reply."""

    def __init__(self, *, vocab_size: int = 0, timeout_s: float) -> None:
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
        """Per round without a reply, how long it may take by itself."""
        self._replied_s = 0.0

    @property
    def is_available(self) -> bool:
        return bool(self._links)

    def connect(self, links: Sequence[Link]) -> None:
        """Use new ranks, rank 0 first, which hold no prefixes yet.

        Their links must call `disconnect` when a connection breaks, which no call notices: ranks above 0 never reply.
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
        """Return a verdict per row, empty if the row's request ended before the row was sent.

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
        self._acknowledged.release(request_id)

    async def _exchange(self, links: list[Link], rows: Sequence[VerifyRow]) -> tuple[Sequence[VerifyRow], AnyReply]:
        """Send the rows whose requests have not ended; return these rows and the reply."""
        async with self._sending:  # or a rank could get two rounds in the wrong order
            if not links or links is not self._links:
                raise PeerGoneError(self._lost)
            # An earlier round may have taken the blocks of a request that has ended.
            rows = [row for row in rows if self._acknowledged.awaits(row.request)]
            if not rows:
                return rows, Verdicts(self._round, links[0].version, 0.0, [], self.unprepared)
            self._round += 1
            deltas, released = self._acknowledged.deltas(rows)
            # Ranks miss no message. Sent twice, it could end a request that has begun under the same id.
            self._acknowledged.acknowledge(released, ())
            entries = [
                VerifyEntry(delta, row.start, row.length, row.draft, row.slot)
                for delta, row in zip(deltas, rows, strict=True)
            ]
            shape = None if any(delta.params is not None for delta in deltas) else shape_of(rows)
            round_s, earlier_s = self._times.deadline_s(shape, self._timeout_s), sum(self._due_s.values())
            request = Verify(self._round, links[0].version, round_s + earlier_s, released, entries)
            self._due_s[request.round] = round_s
            started = time.perf_counter()
            for link in links[1:]:
                await link.post(request)
            answer = await links[0].begin(request)
        reply = await answer
        started, self._replied_s = max(started, self._replied_s), time.perf_counter()
        self.calls.wait_s += self._replied_s - started
        if links is not self._links:
            raise PeerGoneError(self._lost)
        del self._due_s[request.round]  # a round that fails ends all: see `connect`
        if isinstance(reply, Verdicts):
            self._times.observe(shape, self._replied_s - started)
            self._acknowledged.acknowledge((), rows)
        return rows, reply
