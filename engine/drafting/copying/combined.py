"""CombinedDrafter: each row is drafted by the source that promises more: text that occurred before, or the draft model.

A copy costs no pass of the draft model. So a copy may have the longest allowed length, while the length of the model's
chains follows measured goodput.

The source is chosen before anything is drawn. If the choice depended on the model's drawn tokens, they would no longer
have the distribution that the rejection rule assumes, nor the text the target's.
"""

from collections.abc import Sequence

from engine.drafting.copying.suffix import Continuation, SuffixDrafter
from engine.protocols import Draft, Drafter, ProposeRow, chain


class CombinedDrafter:
    """Proposes a copy where it promises more tokens than the model's chain, and the model's chain elsewhere."""

    def __init__(self, model: Drafter, suffix: SuffixDrafter) -> None:
        self._model = model
        self._suffix = suffix
        self._copies: dict[str, Continuation] = {}

    def plan_copies(self, rows: Sequence[ProposeRow], gains: Sequence[float]) -> dict[str, int]:
        """Choose the rows that copy in the next round; see `PlansCopies`."""
        self._suffix.read([row.request for row in rows])
        self._copies = {}
        for row in rows:
            continuation = self._suffix.look_up(row)
            if continuation.num_expected > sum(gains[: row.num_draft_tokens]):
                self._copies[row.request.request_id] = continuation
        return {request_id: len(copy.token_ids) for request_id, copy in self._copies.items()}

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a chain per row, from the source that was chosen for it."""
        model_rows = [row for row in rows if row.request.request_id not in self._copies]
        self._suffix.read([row.request for row in model_rows if not row.num_draft_tokens])
        drafts = iter(await self._model.propose(model_rows) if model_rows else [])
        copies = [(row, self._copies.get(row.request.request_id)) for row in rows]
        return [chain(copy.token_ids[: row.num_draft_tokens]) if copy else next(drafts) for row, copy in copies]

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._copies.pop(request_id, None)
        self._suffix.release(request_id)
        self._model.release(request_id)
