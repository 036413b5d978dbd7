"""NgramDrafter: prompt lookup, as in transformers and vLLM: the request's last n tokens are searched in its text.

The tokens that followed the latest occurrence are the draft, for the largest n that occurs. It needs no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.drafting.copying.token_index import MAX_MATCH, TokenIndex
from engine.protocols import NO_DRAFT, Draft, ProposeRow, Request, chain

_MAX_WINDOW = 2**15
"""Tokens of a request that are searched, the latest ones."""
MAX_READ = 1024
"""Tokens that are added to indexes in a round, so that long prompts do not delay it."""


@dataclass(slots=True)
class RequestText:
    """The committed tokens of a request, as far as they are indexed."""

    index: TokenIndex
    prompt_length: int
    salt: bytes

    @property
    def output(self) -> list[int]:
        """The indexed tokens after the prompt."""
        return self.index.tail(max(self.index.length - self.prompt_length, 0))


class NgramDrafter:
    """Proposes what followed the latest earlier occurrence of a request's last tokens in the request itself."""

    orders: Sequence[int] = (4, 3, 2)

    def __init__(self) -> None:
        self._texts: dict[str, RequestText] = {}

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a chain per row; it is empty where the last tokens did not occur before."""
        self.read([row.request for row in rows])
        return [chain(self._continue(row)) if row.num_draft_tokens else NO_DRAFT for row in rows]

    def read(self, requests: Sequence[Request]) -> None:
        """Index the new tokens of some requests, up to `MAX_READ` of them."""
        room = MAX_READ
        for request in requests:
            room -= self._read(request, room)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._texts.pop(request_id, None)

    def _read(self, request: Request, room: int) -> int:
        """Index up to `room` new tokens of a request; return how many."""
        text = self._texts.get(request.request_id)
        if text is None:
            length = request.prompt_length + request.params.max_tokens
            window = min(1 << (length - 1).bit_length(), _MAX_WINDOW)
            text = RequestText(TokenIndex(window, self.orders), request.prompt_length, request.salt)
            self._texts[request.request_id] = text
        start = text.index.length
        tokens = request.token_ids[start : start + max(room, 0)]
        text.index.extend(tokens)
        return len(tokens)

    def _continue(self, row: ProposeRow) -> list[int]:
        """Return up to `num_draft_tokens` tokens for a row that has been read."""
        index = self._texts[row.request.request_id].index
        matches = index.matches(row.request.token_ids[-MAX_MATCH:])
        if not matches:
            return []
        end = max(match.end for match in matches)
        tokens = (index.token(end + i) for i in range(row.num_draft_tokens))
        return [token for token in tokens if token is not None]
