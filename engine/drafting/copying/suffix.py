"""SuffixDrafter: proposes the most frequent continuation of matches in a request's text and in earlier outputs.

SuffixDecoding (Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2411.04975):
for each match length, the draft follows the most frequent next token while it is likely enough; the draft with the most
expected accepted tokens is proposed. A token's probability is its share among the matches, times the recent acceptance
rate after matches of that length.

Earlier outputs serve only requests with the same cache salt. Memory is bounded: each recently used salt keeps its
latest tokens. Arctic Inference's implementation has no CPU wheels, and its trees grow without bound.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from engine.control.acceptance import Acceptance
from engine.drafting.copying.combined import Continuation
from engine.drafting.copying.ngram import MAX_MATCH, MAX_READ, Match, NgramDrafter, TokenIndex
from engine.protocols import ProposeRow, Request

_MIN_PROB = 0.2
"""A draft ends before the first token that is less likely to be accepted."""
_OUTPUTS_WINDOW = 2**16
"""How many of the latest tokens of earlier outputs are kept per salt; each takes about 50 bytes."""
_MAX_SALTS = 16
_MAX_WAITING = 256
"""How many ended outputs may wait to be indexed; more wait only while nothing is drafted."""
_MAX_LENGTHS = 4
"""How many lengths of match are tried, longest first."""
_SEPARATOR = -1
"""Stands between two outputs; no text has this token."""
_PRIORS = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Initial acceptance rates for matches of 1-3, 4-7, 8-15, 16-31, and 32 or more tokens."""
_FADING = 0.002
"""Share of a match length's record that is forgotten when such a match is not used, so that it is tried again later."""


class SuffixDrafter(NgramDrafter):
    """Proposes the likeliest continuation by the request's own text and by outputs of requests that have ended."""

    orders = (8, 4, 2)

    def __init__(self, *, remembers_outputs: bool = True) -> None:
        """Make a drafter; with `remembers_outputs`, requests of one salt draft from each other's outputs."""
        super().__init__()
        self._remembers_outputs = remembers_outputs
        self._outputs: OrderedDict[bytes, TokenIndex] = OrderedDict()
        self._ended: deque[tuple[bytes, list[int]]] = deque(maxlen=_MAX_WAITING)
        self._acceptance = Acceptance(_PRIORS)
        self._prior_odds = tuple(self._acceptance.odds)
        self._proposed: dict[str, tuple[Continuation, int]] = {}
        """The last proposal for each request, and how many tokens the request had then."""

    def read(self, requests: Sequence[Request]) -> None:
        """Index up to `MAX_READ` new tokens of requests, and as many of ended requests' outputs."""
        self._read_ended(MAX_READ)
        super().read(requests)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, but keep its output for others of its salt."""
        if self._remembers_outputs and request_id in self._texts:
            request, index = self._texts[request_id]
            if output := index.tail(max(index.length - request.prompt_length, 0)):
                self._ended.append((request.salt, [*output, _SEPARATOR]))
        self._proposed.pop(request_id, None)
        super().release(request_id)

    def look_up(self, row: ProposeRow) -> Continuation:
        """Return the best continuation of up to `num_draft_tokens` tokens for a row that has been read."""
        request = row.request
        self._observe(row)
        sources = [self._texts[request.request_id][1]]
        if (outputs := self._outputs.get(request.salt)) is not None:
            self._outputs.move_to_end(request.salt)
            sources.append(outputs)
        context = request.token_ids[-MAX_MATCH:]
        best = max(
            (self._best(index, index.matches(context), row.num_draft_tokens) for index in sources),
            key=lambda continuation: continuation.num_expected,
        )
        self._proposed[request.request_id] = best, len(request.token_ids)
        return best

    def _continue(self, row: ProposeRow) -> list[int]:
        return self.look_up(row).token_ids

    def _observe(self, row: ProposeRow) -> None:
        if row.request.request_id not in self._proposed:
            return
        proposed, start = self._proposed.pop(row.request.request_id)
        pairs = zip(proposed.token_ids, row.request.token_ids[start:], strict=False)
        for place, (token, truth) in enumerate(pairs):
            self._acceptance.observe(_bucket(proposed.match_length + place), accepted=token == truth)
            if token != truth:  # the tokens after it were not decided
                break

    def _best(self, index: TokenIndex, matches: Sequence[Match], limit: int) -> Continuation:
        best = Continuation([])
        lengths = list(dict.fromkeys(match.length for match in matches))[:_MAX_LENGTHS]
        for length in lengths:
            ends = [match.end for match in matches if match.length >= length]
            continuation = self._follow(index, ends, length, limit)
            if continuation.num_expected > best.num_expected:
                best = continuation
        if lengths and not best.token_ids:
            bucket = _bucket(lengths[0])
            self._acceptance.odds[bucket] += _FADING * (self._prior_odds[bucket] - self._acceptance.odds[bucket])
        return best

    def _follow(self, index: TokenIndex, ends: list[int], match_length: int, limit: int) -> Continuation:
        """Follow the most frequent tokens after some matches; the latest wins among equals."""
        drafted: list[int] = []
        prob, num_expected = 1.0, 0.0
        while len(drafted) < limit:
            followers: dict[int, list[int]] = {}
            for end in ends:
                token = index.token(end)
                if token is not None and token != _SEPARATOR:
                    followers.setdefault(token, []).append(end + 1)
            if not followers:
                break
            token = max(followers, key=lambda token: len(followers[token]))
            prob *= self._acceptance.rate(_bucket(match_length + len(drafted))) * len(followers[token]) / len(ends)
            if prob < _MIN_PROB:
                break
            drafted.append(token)
            num_expected += prob
            ends = followers[token]
        return Continuation(drafted, num_expected, match_length)

    def _read_ended(self, room: int) -> None:
        while self._ended and room > 0:
            salt, tokens = self._ended.popleft()
            if salt not in self._outputs:
                self._outputs[salt] = TokenIndex(_OUTPUTS_WINDOW, self.orders)
                if len(self._outputs) > _MAX_SALTS:
                    self._outputs.popitem(last=False)
            self._outputs.move_to_end(salt)
            self._outputs[salt].extend(tokens[:room])
            if len(tokens) > room:
                self._ended.appendleft((salt, tokens[room:]))
            room -= len(tokens)


def _bucket(match_length: int) -> int:
    return min(max((match_length >> 1).bit_length() - 1, 0), len(_PRIORS) - 1)
