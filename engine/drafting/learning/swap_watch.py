"""SwapWatch: whether drafts are accepted less often in the rounds after a swap than in those before it."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.protocols import Draft, ProposeRow, Request

ROUNDS = 64
"""Rounds before and after a swap that are compared."""
TOLERATED = 0.05
"""The fall of acceptance that undoes a swap, beyond `_SURE` standard errors."""
_SURE = 2.0


class Verified(NamedTuple):
    """Draft tokens that were compared with the target's, and those of them that were accepted."""

    compared: int
    accepted: int


class SwapWatch:
    """Compares each draft with how its request went on; only the thread that drafts uses it."""

    def __init__(self) -> None:
        self._drafts: dict[str, tuple[int, Draft]] = {}
        self._rounds = deque([Verified(0, 0)], ROUNDS)
        self._before: Verified | None = None

    def drafted(self, rows: Iterable[ProposeRow], drafts: Iterable[Draft]) -> None:
        """Keep the drafts of a proposal until its requests come again."""
        for row, draft in zip(rows, drafts, strict=False):
            if draft.token_ids:
                self._drafts[row.request.request_id] = len(row.request.token_ids), draft

    def observe(self, requests: Sequence[Request]) -> None:
        """Count a round: what has become of these requests' last drafts."""
        round_ = [self._verified(request) for request in requests if request.request_id in self._drafts]
        if any(verified.compared for verified in round_):
            self._rounds.append(_sum(round_))

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._drafts.pop(request_id, None)

    def begin(self) -> None:
        """Watch the weights that have just taken over."""
        self._before = _sum(self._rounds)
        self._rounds.clear()

    @property
    def is_watching(self) -> bool:
        return self._before is not None

    def is_bad(self) -> bool:
        """Return whether the last swap must be undone; after `ROUNDS` rounds, the watch ends."""
        if self._before is None or len(self._rounds) < ROUNDS:
            return False
        before, after = self._before, _sum(self._rounds)
        self._before = None
        if not before.compared:
            return False
        rate, usual = (verified.accepted / verified.compared for verified in (after, before))
        error = (rate * (1 - rate) / after.compared + usual * (1 - usual) / before.compared) ** 0.5
        return bool(rate + _SURE * error < (1 - TOLERATED) * usual)

    def _verified(self, request: Request) -> Verified:
        length, draft = self._drafts.pop(request.request_id)
        edges = {edge: node for node, edge in enumerate(zip(draft.parents, draft.token_ids, strict=True))}
        node, accepted, inner = -1, 0, {*draft.parents}
        for token in request.token_ids[length:]:
            if node not in inner:  # the draft ends here
                return Verified(accepted, accepted)
            if (child := edges.get((node, token))) is None:
                return Verified(accepted + 1, accepted)
            node, accepted = child, accepted + 1
        return Verified(accepted, accepted)


def _sum(rounds: Iterable[Verified]) -> Verified:
    return Verified(*map(sum, zip((0, 0), *rounds, strict=True)))
