"""TargetResponder: computes the replies of one of the target's ranks, without Ray and without sockets."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.protocol.messages import AnyReply, AnyRequest, PrefixMissing, Verdicts, Verify
from cluster.protocol.prefix_delta import PrefixTable
from engine.errors import TargetError
from engine.protocols import NO_DRAFT, Draft, Verdict, VerifyRow, run_in_process
from engine.stats.preparation import PREPARATION

if TYPE_CHECKING:
    from cluster.workers.features import FeatureSource
    from engine.drafting.assembly import LoadedVerifier


class TargetResponder:
    """Runs `Verify` on one rank of the target; rank 0 replies.

    Every pass has all-reduces, so a rank that skipped a pass would add its next pass to the others' last. After a gap
    in the rounds or any failure, this rank exits, and the group restarts all ranks.
    """

    def __init__(self, verifier: "LoadedVerifier | FeatureSource", *, rank: int, capacity: int, version: int) -> None:
        self.work: Callable[[], bool] = getattr(verifier, "work", lambda: False)
        """Called after each reply: sends features, if the verifier has any."""
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
    return [
        replace(
            verdict, draft=Draft(verdict.draft.token_ids, verdict.draft.parents) if row.draft.num_deferred else NO_DRAFT
        )
        for verdict, row in zip(verdicts, rows, strict=False)
    ]


def _since(started: float) -> float:
    return time.perf_counter() - started
