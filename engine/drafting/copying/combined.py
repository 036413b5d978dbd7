"""CombinedDrafter: each row is drafted by the source that promises more: text that occurred before, or the draft model.

A copy costs no pass of the draft model, which is not called at all in rounds in which every row copies. So a copy may
be as long as any draft may, while the length of the model's chains follows measured goodput.

The source is chosen before anything is drawn, by the committed tokens and by how earlier drafts fared. If the choice
depended on the tokens that the model has drawn, these would no longer have the distribution that they were drawn from,
by which the rejection rule decides, and the text would not have the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.drafting.copying.suffix import Continuation, SuffixDrafter
from engine.protocols import Draft, Drafter, ProposeRow, chain

_PRIOR_RATE = 0.7
_REMEMBERED = 100


@dataclass(slots=True)
class _Chain:
    """The draft that a model made last for a request, and the number of tokens that the request had then."""

    token_ids: list[int]
    length: int


class CombinedDrafter:
    """Proposes a copy where it promises more tokens than the model's chain, and the model's chain elsewhere."""

    def __init__(self, model: Drafter, suffix: SuffixDrafter) -> None:
        self._model = model
        self._suffix = suffix
        self._copies: dict[str, Continuation] = {}
        self._chains: dict[str, _Chain] = {}
        self._rates: list[float] = []

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model's drafter, such as its counters."""
        return getattr(self._model, name)

    def plan_copies(self, rows: Sequence[ProposeRow], num_model_tokens: int) -> dict[str, int]:
        """Choose the rows of the next round that will copy, and return the lengths of their drafts by request id.

        Args:
            rows: with the most tokens that a draft of each may have.
            num_model_tokens: the length of the model's chains.
        """
        self._suffix.read([row.request for row in rows])
        self._copies = {}
        for row in rows:
            self._observe(row)
            continuation = self._suffix.look_up(row)
            if continuation.num_expected > self._expected(min(num_model_tokens, row.num_draft_tokens)):
                self._copies[row.request.request_id] = continuation
        return {request_id: len(copy.token_ids) for request_id, copy in self._copies.items()}

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a chain per row, from the source that was chosen for it."""
        others = [row for row in rows if row.request.request_id not in self._copies]
        prompts = [row.request for row in others if not row.num_draft_tokens]
        self._suffix.read(prompts)
        drafts: dict[str, Draft] = {}
        if others:
            for row, draft in zip(others, await self._model.propose(others), strict=True):
                drafts[row.request.request_id] = draft
                if draft.token_ids:
                    self._chains[row.request.request_id] = _Chain(draft.token_ids, len(row.request.token_ids))
        for row in rows:
            if (copy := self._copies.get(row.request.request_id)) is not None:
                drafts[row.request.request_id] = chain(copy.token_ids[: row.num_draft_tokens])
        return [drafts[row.request.request_id] for row in rows]

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._chains.pop(request_id, None)
        self._copies.pop(request_id, None)
        self._suffix.release(request_id)
        self._model.release(request_id)

    def _expected(self, num_tokens: int) -> float:
        """Return how many of the first tokens of a model's chain are expected to be accepted."""
        expected, reached = 0.0, 1.0
        for position in range(num_tokens):
            reached *= self._rates[position] if position < len(self._rates) else _PRIOR_RATE
            expected += reached
        return expected

    def _observe(self, row: ProposeRow) -> None:
        """Learn from the tokens that were committed after the model's last chain for a request."""
        last = self._chains.pop(row.request.request_id, None)
        if last is None:
            return
        committed = row.request.token_ids[last.length : last.length + len(last.token_ids)]
        for position, (token, truth) in enumerate(zip(last.token_ids, committed, strict=False)):
            if position == len(self._rates):
                self._rates.append(_PRIOR_RATE)
            self._rates[position] += ((token == truth) - self._rates[position]) / _REMEMBERED
            if token != truth:
                break
