"""Responders: compute the reply to a request, without Ray and without sockets."""

import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from cluster.protocol.messages import (
    AnyReply,
    AnyRequest,
    Drafts,
    Failure,
    Ping,
    Pong,
    PrefixDelta,
    PrefixMissing,
    Propose,
    RoundMessage,
    Verdicts,
    Verify,
)
from cluster.protocol.prefix_delta import PrefixTable
from engine.errors import TargetError
from engine.protocols import Drafter, ProposeRow, Verdict, VerifyRow
from engine.stats import RunAheadStats

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 50e-6
"""Pause between two looks for a request while the device computes a pass ahead."""


class ShardVerifier(Protocol):
    """A verifier that can run its forward pass without deciding, as ranks above 0 do."""

    async def verify(self, rows: Sequence[VerifyRow], *, decides: bool = True) -> list[Verdict]:
        """Return one verdict per row, or an empty list if another rank decides."""
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """A drafter that drafts ahead between requests, one pass at a time; see `RunAheadDrafter`."""

    stats: RunAheadStats

    @property
    def has_time(self) -> bool:
        """Whether `advance` has work that is likely to finish before the next request."""
        ...

    @property
    def is_computing(self) -> bool:
        """Whether a pass that `advance` launched is still under way."""
        ...

    def advance(self) -> bool:
        """Launch one forward pass or prepare it; return whether there is more to do."""
        ...

    def stop(self) -> None:
        """Discard what was prepared."""
        ...


class DraftResponder:
    """Replies to `Propose` with a drafter in this process; its errors become `Failure` replies."""

    def __init__(self, drafter: Drafter, *, capacity: int, version: int) -> None:
        self._drafter = drafter
        self._ahead = drafter if isinstance(drafter, RunsAhead) else None
        self._table = PrefixTable(capacity)
        self._version = version

    def answer(self, request: AnyRequest) -> AnyReply | None:
        """Return the reply to a request; None if it is for another version of the group."""
        if request.version != self._version:
            return None
        started = time.perf_counter()
        try:
            return self._answer(request, started)
        except Exception as error:  # an error costs the Router one round's drafts, not this process
            logger.exception("Round %d failed", request.round)
            return Failure(request.round, self._version, _since(started), f"{type(error).__name__}: {error}")

    def work(self) -> bool:
        """Prepare drafts with at most one forward pass; return whether there is more to do.

        While the device computes that pass, a request may come and find its draft prepared already, so nothing here
        waits for the pass to end.
        """
        if self._ahead is None or not self._ahead.has_time:
            return False
        if self._ahead.is_computing:
            time.sleep(_POLL_S)
            return True
        try:
            return self._ahead.advance()
        except Exception:  # as above: an error costs only what was prepared
            logger.exception("Running ahead failed")
            self._ahead.stop()
            return False

    def _answer(self, request: AnyRequest, started: float) -> AnyReply:
        for request_id in request.released:
            self._table.release(request_id)
            self._drafter.release(request_id)
        if isinstance(request, Ping):
            return Pong(request.round, self._version, _since(started))
        if not isinstance(request, Propose):
            return Failure(
                request.round, self._version, 0.0, f"a draft worker does not accept {type(request).__name__}"
            )
        deltas = [entry.prefix for entry in request.rows]
        if missing := self._table.missing(deltas):
            return PrefixMissing(request.round, self._version, _since(started), missing)
        for request_id in self._table.apply(deltas):
            self._drafter.release(request_id)
        rows = [self._row(entry.prefix, entry.num_draft_tokens) for entry in request.rows]
        drafts = finish(self._drafter.propose(rows))
        stats = None if self._ahead is None else self._ahead.stats
        return Drafts(request.round, self._version, _since(started), drafts, stats)

    def _row(self, delta: PrefixDelta, num_draft_tokens: int) -> ProposeRow:
        return ProposeRow(self._table[delta.request_id].request, num_draft_tokens)


class TargetResponder:
    """Runs `Verify` on one rank of the target; rank 0 replies.

    Every rank gets the same requests and runs the same forward passes, which all-reduce over the ranks. A rank that
    skipped a pass would mix its next pass into the others' last one. So after a gap in the rounds or any failure, this
    rank exits, and the group restarts all ranks.
    """

    def __init__(self, verifier: ShardVerifier, *, rank: int, capacity: int, version: int) -> None:
        self._verifier = verifier
        self._rank = rank
        self._table = PrefixTable(capacity)
        self._version = version
        self._round = 0

    def answer(self, request: AnyRequest) -> AnyReply | None:
        """Return the reply on rank 0, else None; None also for a request for another version of the group.

        Raises:
            TargetError: this rank missed a round, or the request is not a `Verify`.
        """
        if request.version != self._version:
            return None
        self._check_round(request)
        reply = self._answer(request)
        return reply if self._rank == 0 else None

    def _check_round(self, request: RoundMessage) -> None:
        if request.round != self._round + 1:
            raise TargetError(f"rank {self._rank} received round {request.round} after round {self._round}")
        self._round = request.round

    def _answer(self, request: AnyRequest) -> AnyReply:
        if not isinstance(request, Verify):
            raise TargetError(f"a target worker does not accept {type(request).__name__}")
        started = time.perf_counter()
        for request_id in request.released:
            self._table.release(request_id)
            self._verifier.release(request_id)
        deltas = [entry.prefix for entry in request.rows]
        if missing := self._table.missing(deltas):
            return PrefixMissing(request.round, self._version, _since(started), missing)
        for request_id in self._table.apply(deltas):
            self._verifier.release(request_id)
        verdicts = finish(self._verifier.verify(self._rows(request), decides=self._rank == 0))
        return Verdicts(request.round, self._version, _since(started), verdicts)

    def _rows(self, request: Verify) -> list[VerifyRow]:
        rows = []
        for entry in request.rows:
            prefix = self._table[entry.prefix.request_id]
            rows.append(VerifyRow(prefix.request, entry.start, entry.length, prefix.block_ids, entry.draft))
        return rows


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits, without an event loop.

    Raises:
        RuntimeError: the coroutine waited.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a worker's model waited for something; it must only compute")


def _since(started: float) -> float:
    return time.perf_counter() - started
