"""PredictionCopier: copies from the output that a client predicts, such as the file that it wants edited.

The output is followed through the prediction token by token. After a difference, the draft assumes that one token was
replaced; otherwise the output's last tokens find the place again, as in `ngram`. The more tokens agreed before a place,
the longer the draft, so a wrong prediction costs a few short drafts. A draft depends only on the prediction and on
committed tokens, so every rule may take it as certain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.drafting.copying.combined import Continuation
from engine.drafting.copying.ngram import MAX_MATCH, MAX_READ, MAX_WINDOW, TokenIndex
from engine.protocols import ProposeRow, Request

LONGEST_COPY = 16
"""The most tokens of a copy, even if `num_speculative_tokens` is less; in full batches, copies are shorter."""
_ORDERS = (4, 3, 2)
_MOST_AGREED = LONGEST_COPY // 2
"""More agreed tokens change nothing. Each prediction begins with as many, as if its start were certain."""
_TRUST_LOST = 4
"""The divisor of the agreed tokens at a difference: copies continue after one difference, not after two in a row."""


@dataclass(slots=True)
class _Place:
    """Where a request's output is in its prediction."""

    index: TokenIndex
    next: int = 0  # index of the predicted next token
    num_agreed: int = _MOST_AGREED  # tokens before `next` that agreed; 0 if the place is unknown
    num_followed: int = 0  # output tokens that were compared

    def follow(self, request: Request) -> None:
        predicted = request.predicted_token_ids
        for token in request.token_ids[request.prompt_length + self.num_followed :]:
            agrees = self.next < len(predicted) and predicted[self.next] == token
            more, less = min(self.num_agreed + 1, _MOST_AGREED), self.num_agreed // _TRUST_LOST
            self.num_agreed = more if agrees and self.num_agreed else less
            self.next += 1
        self.num_followed = request.num_output_tokens
        if not self.num_agreed and (matches := self.index.matches(request.token_ids[-MAX_MATCH:])):
            longest = max(matches, key=lambda match: (match.length, -abs(match.end - self.next)))
            self.num_agreed, self.next = min(longest.length, _MOST_AGREED), longest.end


class PredictionCopier:
    """Continues requests by their predictions, if they have any."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def read(self, requests: Sequence[Request]) -> None:
        room = MAX_READ
        for request in requests:
            predicted = request.predicted_token_ids
            if not predicted:
                continue
            if request.request_id not in self._places:
                window = min(1 << (len(predicted) - 1).bit_length(), MAX_WINDOW)
                self._places[request.request_id] = _Place(TokenIndex(window, _ORDERS))
            index = self._places[request.request_id].index
            tokens = predicted[index.length : index.length + room]
            index.extend(tokens)
            room -= len(tokens)

    def look_up(self, row: ProposeRow) -> Continuation:
        """Return the predicted next tokens; they may exceed the row's limit, unless the request set it."""
        place = self._places.get(row.request.request_id)
        if place is None:
            return Continuation([])
        place.follow(row.request)
        limit = LONGEST_COPY if row.request.params.num_speculative_tokens is None else row.num_draft_tokens
        end = place.next + min(limit, 2 * place.num_agreed)
        tokens = list(row.request.predicted_token_ids[place.next : end])
        return Continuation(tokens, place.num_agreed, is_predicted=True)

    def release(self, request_id: str) -> None:
        self._places.pop(request_id, None)
