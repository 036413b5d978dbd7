"""SwapWatch: whether drafts are accepted less often in the rounds after a swap than in those before it."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.protocols import Draft, ProposeRow, Request

ROUNDS = 64
"""Rounds after a swap until it is judged, if they are of so many requests:"""
MIN_REQUESTS = 8
TOLERATED = 0.05
"""The fall of acceptance that undoes a swap, beyond `_SURE` standard errors. Some texts are much easier than others."""
_SURE = 2.0
_MOST_REQUESTS = 64
_MOST_DRAFTS = 4096


class Verified(NamedTuple):
    """Draft tokens that were compared with the target's, and those of them that were accepted."""

    compared: int
    accepted: int


class SwapWatch:
    """Compares each draft with how its request went on; only the thread that drafts uses it."""

    def __init__(self) -> None:
        self._drafts: dict[str, tuple[int, Draft]] = {}
        self._requests: dict[str, Verified] = {}
        self._num_rounds = 0
        self._before: list[Verified] | None = None

    def drafted(self, rows: Iterable[ProposeRow], drafts: Iterable[Draft]) -> None:
        """Keep the drafts of a proposal until its requests come again."""
        for row, draft in zip(rows, drafts, strict=False):
            if draft.token_ids:
                self._drafts[row.request.request_id] = len(row.request.token_ids), draft
        while len(self._drafts) > _MOST_DRAFTS:  # of requests whose end nobody tells
            del self._drafts[next(iter(self._drafts))]

    def observe(self, requests: Sequence[Request]) -> None:
        """Count a round: what has become of these requests' last drafts."""
        self._num_rounds += 1
        for request in requests:
            if request.request_id in self._drafts and (verified := self._verified(request)).compared:
                former = self._requests.pop(request.request_id, Verified(0, 0))
                self._requests[request.request_id] = Verified(*map(sum, zip(former, verified, strict=True)))
        for request_id in [*self._requests][:-_MOST_REQUESTS]:
            del self._requests[request_id]

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._drafts.pop(request_id, None)

    def begin(self) -> None:
        """Watch the weights that have just taken over."""
        self._before = [*self._requests.values()]
        self._requests.clear()
        self._num_rounds = 0

    @property
    def is_watching(self) -> bool:
        return self._before is not None

    def is_bad(self) -> bool:
        """Return whether the last swap must be undone; after enough rounds, the watch ends."""
        if self._before is None or self._num_rounds < ROUNDS or len(self._requests) < MIN_REQUESTS:
            return False
        before, self._before = self._before, None
        if len(before) < MIN_REQUESTS:
            return False
        (usual, error_before), (rate, error) = _rate(before), _rate([*self._requests.values()])
        return rate + _SURE * math.hypot(error, error_before) < (1 - TOLERATED) * usual

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


def _rate(requests: Sequence[Verified]) -> tuple[float, float]:
    """Return the acceptance rate of some requests, and its standard error."""
    compared, accepted = map(sum, zip(*requests, strict=True))
    rate = accepted / compared
    return rate, math.sqrt(sum((own.accepted - rate * own.compared) ** 2 for own in requests)) / compared
