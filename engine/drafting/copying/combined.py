"""CombinedDrafter: drafts each row by a copy of known text or by another drafter, whichever promises more tokens.

A copy costs no pass, so it may have the longest allowed length, while a model's chains follow measured goodput. The
source is chosen before anything is drawn: a choice by the drawn tokens would change their distribution, and the
rejection rule would no longer give the target's text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from engine.protocols import Draft, Drafter, PlansCopies, ProposeRow, Request, chain


class Continuation(NamedTuple):
    """Draft tokens that a source proposes."""

    token_ids: list[int]
    num_expected: float = 0.0  # accepted tokens
    match_length: int = 0  # tokens that agreed before them
    is_predicted: bool = False  # by the client

    def draft(self, length: int) -> Draft:
        return replace(chain(self.token_ids[:length]), is_predicted=self.is_predicted)


class Copier(Protocol):
    """Finds text that may occur again, in what it has read of requests."""

    def read(self, requests: Sequence[Request]) -> None: ...

    def look_up(self, row: ProposeRow) -> Continuation:
        """Return the best continuation of a row that has been read; empty if there is none."""
        ...

    def release(self, request_id: str) -> None: ...


class CombinedDrafter:
    """Proposes a copy for each row where it promises more tokens than the other drafter's chain, else that chain."""

    def __init__(self, drafter: Drafter, copier: Copier) -> None:
        """Combine a drafter, which may copy itself, with a source of copies."""
        self.drafter = drafter
        self._planner = drafter if isinstance(drafter, PlansCopies) else None
        self._copier = copier
        self._copies: dict[str, Continuation] = {}

    def plan_copies(self, rows: Sequence[ProposeRow], expected: Mapping[str, float]) -> dict[str, int]:
        self._copier.read([row.request for row in rows])
        self._copies = {}
        for row in rows:
            continuation = self._copier.look_up(row)
            if continuation.token_ids and continuation.num_expected > expected[row.request.request_id]:
                self._copies[row.request.request_id] = continuation
        lengths = {request_id: len(copy.token_ids) for request_id, copy in self._copies.items()}
        if self._planner is not None:
            lengths |= self._planner.plan_copies(
                [row for row in rows if row.request.request_id not in lengths], expected
            )
        return lengths

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        # Looked up once: a request may be released while the other drafter is awaited.
        copies = [(row, self._copies.get(row.request.request_id)) for row in rows]
        others = [row for row, copy in copies if copy is None]
        self._copier.read([row.request for row in others if not row.num_draft_tokens])
        drafts = iter(await self.drafter.propose(others) if others else [])
        return [copy.draft(row.num_draft_tokens) if copy else next(drafts) for row, copy in copies]

    def release(self, request_id: str) -> None:
        self._copies.pop(request_id, None)
        self._copier.release(request_id)
        self.drafter.release(request_id)
