"""SuffixDrafter: proposes what followed the longest matches in a request's text and in earlier outputs, by frequency.

SuffixDecoding (Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
2411.04975): for each length of match, the draft follows the token that followed most often, as long as it is likely
enough; of these drafts, the one is proposed of which most tokens are expected to be accepted. How likely a token is
accepted is its share among the matches, times the rate at which tokens after such matches were accepted lately.

Outputs of earlier requests are searched only for requests with the same cache salt. Memory is bounded: of each salt the
latest tokens are kept, and the salts that were used last.

Why not Arctic Inference's implementation: there are no wheels for CPUs, building it needs torch and a compiler, and the
memory of its trees has no bound in tokens.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.drafting.copying.ngram import MAX_READ, NgramDrafter
from engine.drafting.copying.token_index import MAX_MATCH, Match, TokenIndex
from engine.drafting.copying.track_record import TrackRecord
from engine.protocols import ProposeRow, Request

_MIN_PROB = 0.2
"""A draft ends before the first token that is less likely to be accepted."""
_OUTPUTS_WINDOW = 2**16
"""Tokens of earlier outputs per salt, the latest ones; each takes about 50 bytes."""
_MAX_SALTS = 16
_MAX_WAITING = 256
"""Outputs that have ended and are not indexed yet; more only wait while nothing is drafted."""
_MAX_LENGTHS = 4
"""Different lengths of match from which drafts are tried, the longest first."""
_SEPARATOR = -1
"""Stands between two outputs; no text has this token."""


class Continuation(NamedTuple):
    """Draft tokens, how many of them are expected to be accepted, and the length of the match that they followed."""

    token_ids: list[int]
    num_expected: float = 0.0
    match_length: int = 0


@dataclass(frozen=True, slots=True)
class _Proposed:
    """What was proposed last for a request, and the number of tokens it had then."""

    continuation: Continuation
    length: int


class SuffixDrafter(NgramDrafter):
    """Proposes the likeliest continuation by the request's own text and by outputs of requests that have ended."""

    orders = (8, 4, 2)

    def __init__(self, *, remembers_outputs: bool = True) -> None:
        """Make a drafter; with `remembers_outputs`, requests of one salt draft from each other's outputs."""
        super().__init__()
        self._remembers_outputs = remembers_outputs
        self._outputs: OrderedDict[bytes, TokenIndex] = OrderedDict()
        self._ended: deque[tuple[bytes, list[int]]] = deque(maxlen=_MAX_WAITING)
        self._record = TrackRecord()
        self._proposed: dict[str, _Proposed] = {}

    def read(self, requests: Sequence[Request]) -> None:
        """Index the new tokens of some requests and the outputs of those that have ended, up to `MAX_READ` of each."""
        self._read_ended(MAX_READ)
        super().read(requests)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, but keep its output for others of its salt."""
        text = self._texts.get(request_id)
        if text is not None and self._remembers_outputs and (output := text.output):
            self._ended.append((text.salt, [*output, _SEPARATOR]))
        self._proposed.pop(request_id, None)
        super().release(request_id)

    def look_up(self, row: ProposeRow) -> Continuation:
        """Return the best continuation of up to `num_draft_tokens` tokens for a row that has been read."""
        request = row.request
        self._observe(row)
        sources = [self._texts[request.request_id].index]
        if (outputs := self._outputs.get(request.salt)) is not None:
            self._outputs.move_to_end(request.salt)
            sources.append(outputs)
        context = request.token_ids[-MAX_MATCH:]
        best = max(
            (self._best(index, index.matches(context), row.num_draft_tokens) for index in sources),
            key=lambda continuation: continuation.num_expected,
        )
        self._proposed[request.request_id] = _Proposed(best, len(request.token_ids))
        return best

    def _continue(self, row: ProposeRow) -> list[int]:
        return self.look_up(row).token_ids

    def _observe(self, row: ProposeRow) -> None:
        """Learn from the tokens that were committed after the last proposal."""
        proposed = self._proposed.pop(row.request.request_id, None)
        if proposed is None or not proposed.continuation.token_ids:
            return
        (drafted, _, match_length), start = proposed.continuation, proposed.length
        committed = row.request.token_ids[start : start + len(drafted)]
        pairs = zip(drafted, committed, strict=False)
        num_accepted = next((i for i, (token, truth) in enumerate(pairs) if token != truth), len(committed))
        self._record.observe(match_length, min(len(drafted), len(committed)), num_accepted)

    def _best(self, index: TokenIndex, matches: Sequence[Match], limit: int) -> Continuation:
        """Return the continuation with the most expected tokens over the lengths of match."""
        best = Continuation([])
        lengths = list(dict.fromkeys(match.length for match in matches))[:_MAX_LENGTHS]
        for length in lengths:
            ends = [match.end for match in matches if match.length >= length]
            continuation = self._follow(index, ends, length, limit)
            if continuation.num_expected > best.num_expected:
                best = continuation
        if lengths and not best.token_ids:
            self._record.observe_skip(lengths[0])
        return best

    def _follow(self, index: TokenIndex, ends: list[int], match_length: int, limit: int) -> Continuation:
        """Follow the most frequent tokens after some matches, the latest among equals."""
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
            prob *= self._record.rate(match_length + len(drafted)) * len(followers[token]) / len(ends)
            if prob < _MIN_PROB:
                break
            drafted.append(token)
            num_expected += prob
            ends = followers[token]
        return Continuation(drafted, num_expected, match_length)

    def _read_ended(self, room: int) -> None:
        """Index up to `room` tokens of outputs that have ended."""
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
