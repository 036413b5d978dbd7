"""Responders: compute the reply to a request, without Ray and without sockets."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from cluster.protocol.messages import (
    AnyReply,
    AnyRequest,
    Drafts,
    Failure,
    Ping,
    Pong,
    PrefixMissing,
    Propose,
    Verdicts,
    Verify,
)
from cluster.protocol.prefix_delta import PrefixTable
from engine.control.stats import PREPARATION
from engine.drafting.model.feature_store import FeatureStore
from engine.errors import TargetError
from engine.protocols import NO_DRAFT, Draft, Drafter, ProposeRow, Verdict, VerifyRow, run_in_process

if TYPE_CHECKING:
    from cluster.workers.features import FeatureSource
    from engine.drafting.run_ahead.passes import PassesAhead
    from engine.verification.verifier import ModelVerifier

logger = logging.getLogger(__name__)

_POLL_S = 50e-6
"""Pause between two looks for a request while the device computes a pass ahead."""


class DraftResponder:
    """Replies to `Propose` with a drafter in this process; its errors become `Failure` replies."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        capacity: int,
        version: int,
        features: FeatureStore | None = None,
        forget: Callable[[str], None] | None = None,
    ) -> None:
        """Answer with a drafter; `forget` gets the ids of requests that it need not hold, in place of `release`."""
        self._drafter = drafter
        self._feature_counts = {} if features is None else features.counts
        self.ahead = cast("PassesAhead", drafter) if hasattr(drafter, "advance") else None
        self._table = PrefixTable(capacity, forget or drafter.release)
        self.version = version

    def answer(self, request: AnyRequest) -> AnyReply | None:
        """Return the reply to a request; None if it is for another version of the group."""
        started, read = time.perf_counter(), None
        try:
            read = self.read(request)
            if not isinstance(read, list):
                return read
            assert isinstance(request, Propose)
            if self.ahead is not None:
                self.ahead.runs_ahead = request.runs_ahead
            return self.drafts(request, run_in_process(self._drafter.propose(read)), _since(started))
        except Exception as error:  # an error costs the Router one round's drafts, not this process
            logger.exception("Round %d failed", request.round)
            for row in read if isinstance(read, list) else ():  # what is computed of them is not known
                self._drafter.release(row.request.request_id)
            return failure(request, error, _since(started))

    def read(self, request: AnyRequest) -> list[ProposeRow] | AnyReply | None:
        """Return the rows of a proposal, or what else is the reply; None if it is for another version."""
        if request.version != self.version:
            return None
        if isinstance(request, Ping):
            return Pong(request.round, self.version, 0.0)
        if not isinstance(request, Propose):
            message = f"a draft worker does not accept {type(request).__name__}"
            return Failure(request.round, self.version, 0.0, message)
        if missing := self._table.update(request.released, [entry.prefix for entry in request.rows]):
            return PrefixMissing(request.round, self.version, 0.0, missing)
        requests = [self._table[entry.prefix.request_id].request for entry in request.rows]
        return [ProposeRow(one, entry.num_draft_tokens) for one, entry in zip(requests, request.rows, strict=True)]

    def drafts(self, request: Propose, drafts: list[Draft], seconds: float) -> Drafts:
        """Return the reply to a proposal, which took so many seconds."""
        stats, counts = None if self.ahead is None else self.ahead.stats, PREPARATION.counts
        return Drafts(request.round, self.version, seconds, drafts, stats, counts, self._feature_counts)

    def work(self) -> bool:
        """Launch at most one forward pass ahead, without waiting for its end; return whether there is more to do."""
        if self.ahead is None or not self.ahead.has_time:
            return False
        if self.ahead.is_computing:
            time.sleep(_POLL_S)
            return True
        try:
            return self.ahead.advance()
        except Exception:  # as above: an error costs only prepared drafts
            logger.exception("Running ahead failed")
            self.ahead.forget()
            return False


class TargetResponder:
    """Runs `Verify` on one rank of the target; rank 0 replies.

    All ranks run the same forward passes, with an all-reduce in each. A rank that skipped a pass would add its next one
    to the others' last. So after a gap in the rounds or any failure, this rank exits, and the group restarts all ranks.
    """

    def __init__(self, verifier: "ModelVerifier | FeatureSource", *, rank: int, capacity: int, version: int) -> None:
        """Answer for a rank; its `work` is that of the verifier, once its reply has been sent."""
        self.work: Callable[[], bool] = getattr(verifier, "work", lambda: False)
        self._verifier = verifier
        self._rank = rank
        self._table = PrefixTable(capacity, verifier.release)
        self._version = version
        self._round = 0

    def answer(self, request: AnyRequest) -> AnyReply | None:
        """Return rank 0's reply; None on other ranks, and for a request to another version of the group.

        Raises TargetError if this rank missed a round, or the request is not a `Verify`.
        """
        if request.version != self._version:
            return None
        if request.round != self._round + 1:
            raise TargetError(f"rank {self._rank} received round {request.round} after round {self._round}")
        self._round = request.round
        if not isinstance(request, Verify):
            raise TargetError(f"a target worker does not accept {type(request).__name__}")
        reply = self._verify(request)
        return reply if self._rank == 0 else None

    def _verify(self, request: Verify) -> AnyReply:
        started = time.perf_counter()
        if missing := self._table.update(request.released, [entry.prefix for entry in request.rows]):
            return PrefixMissing(request.round, self._version, _since(started), missing)
        rows = []
        for entry in request.rows:
            prefix = self._table[entry.prefix.request_id]
            row = VerifyRow(prefix.request, entry.start, entry.length, prefix.block_ids, entry.draft, entry.slot)
            rows.append(row)
        verdicts = _without_known_drafts(run_in_process(self._verifier.verify(rows, decides=self._rank == 0)), rows)
        return Verdicts(request.round, self._version, _since(started), verdicts, PREPARATION.counts)


def _without_known_drafts(verdicts: Sequence[Verdict], rows: Sequence[VerifyRow]) -> list[Verdict]:
    """Drop the draft tokens that the Router sent; keep only those drawn here."""
    return [
        replace(
            verdict,
            draft=Draft(verdict.draft.token_ids, verdict.draft.parents) if row.draft.num_deferred else NO_DRAFT,
        )
        for verdict, row in zip(verdicts, rows, strict=False)
    ]


def failure(request: AnyRequest, error: Exception, seconds: float) -> Failure:
    """Return the reply to a request that failed."""
    return Failure(request.round, request.version, seconds, f"{type(error).__name__}: {error}")


def _since(started: float) -> float:
    return time.perf_counter() - started
