"""CombinedDrafter: each row is drafted by the source that promises more: a copy of known text, or another drafter.

A copy costs no pass of a draft model. So a copy may have the longest allowed length, while the length of a model's
chains follows measured goodput.

The source is chosen before anything is drawn. If the choice depended on the model's drawn tokens, they would no longer
have the distribution that the rejection rule assumes, nor the text the target's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from engine.protocols import Draft, Drafter, PlansCopies, ProposeRow, Request, chain


class Continuation(NamedTuple):
    """Draft tokens, the expected number of accepted ones, and the length of the match before them.

    `is_predicted` says that the client predicted them.
    """

    token_ids: list[int]
    num_expected: float = 0.0
    match_length: int = 0
    is_predicted: bool = False

    def draft(self, length: int) -> Draft:
        """Return the first `length` tokens as a draft."""
        return replace(chain(self.token_ids[:length]), is_predicted=self.is_predicted)


class Copier(Protocol):
    """Finds text that may occur again."""

    def read(self, requests: Sequence[Request]) -> None:
        """Index the text that some requests bring."""
        ...

    def look_up(self, row: ProposeRow) -> Continuation:
        """Return the best continuation of a row that has been read; an empty one if there is none."""
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        ...


class CombinedDrafter:
    """Proposes a copy where it promises more tokens than the other drafter's chain, and that chain elsewhere."""

    def __init__(self, drafter: Drafter, copier: Copier) -> None:
        """Combine a drafter, which may copy itself, with a source of copies."""
        self.drafter = drafter
        self._planner = drafter if isinstance(drafter, PlansCopies) else None
        self._copier = copier
        self._copies: dict[str, Continuation] = {}

    def plan_copies(self, rows: Sequence[ProposeRow], expected: Mapping[str, float]) -> dict[str, int]:
        """Choose the rows that copy in the next round; see `PlansCopies`."""
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
        """Return a draft per row, from the source that was chosen for it."""
        # Looked up once: a request may be released while the other drafter is awaited.
        copies = [(row, self._copies.get(row.request.request_id)) for row in rows]
        others = [row for row, copy in copies if copy is None]
        self._copier.read([row.request for row in others if not row.num_draft_tokens])
        drafts = iter(await self.drafter.propose(others) if others else [])
        return [copy.draft(row.num_draft_tokens) if copy else next(drafts) for row, copy in copies]

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._copies.pop(request_id, None)
        self._copier.release(request_id)
        self.drafter.release(request_id)
