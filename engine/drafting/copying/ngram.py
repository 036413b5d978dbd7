"""NgramDrafter: prompt lookup, as in transformers and vLLM, without a model.

The draft is what followed the latest occurrence of the request's last n tokens, for the largest n that occurs.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from engine.protocols import NO_DRAFT, Draft, ProposeRow, Request, chain

MAX_MATCH = 32
"""How many of a context's last tokens are compared."""
_MAX_CHAIN = 16
"""How many earlier occurrences are looked at, the latest first."""
MAX_WINDOW = 2**15
"""How many of a request's latest tokens are searched."""
MAX_READ = 1024
"""How many tokens are indexed in a round, so that long prompts do not delay it."""


class Match(NamedTuple):
    """An earlier occurrence of the end of a context: how many tokens agree, and the position after them."""

    length: int
    end: int


class TokenIndex:
    """The last `window` tokens of a text, and where its n-grams occurred, found as LZ77 compressors find matches.

    For each n, a hash table holds an n-gram's latest position, and a chain leads from each position to the previous
    position with the same hash. Adding a token takes about a microsecond. Old positions are overwritten, so evicting
    takes nothing. In Python, a suffix tree or automaton would take several dictionaries per token. Positions count from
    the text's start.
    """

    def __init__(self, window: int, orders: Sequence[int]) -> None:
        """Make an empty index; `window` is a power of two, `orders` are lengths of n-grams in descending order."""
        assert window & (window - 1) == 0
        self.length = 0
        self._window = window
        self._orders = orders
        self._tokens = array("i", bytes(4 * window))
        self._latest = [array("q", [-1]) * window for _ in orders]
        self._earlier = [array("q", [-1]) * window for _ in orders]

    def extend(self, token_ids: Sequence[int]) -> None:
        mask, tokens = self._window - 1, self._tokens
        text = [*self.tail(self._orders[0] - 1), *token_ids]
        num_known = len(text) - len(token_ids)
        tables = list(zip(self._orders, self._latest, self._earlier, strict=True))
        for i in range(num_known, len(text)):
            position = self.length
            entry = position & mask
            tokens[entry] = text[i]
            for n, latest, earlier in tables:
                if i + 1 < n:
                    continue
                slot = hash(tuple(text[i + 1 - n : i + 1])) & mask
                earlier[entry] = latest[slot]
                latest[slot] = position
            self.length += 1

    def tail(self, count: int) -> list[int]:
        start = max(self.length - min(count, self._window), 0)
        return [self._tokens[position & (self._window - 1)] for position in range(start, self.length)]

    def token(self, position: int) -> int | None:
        """Return the token at a position; None at the end of the text."""
        return self._tokens[position & (self._window - 1)] if position < self.length else None

    def matches(self, context: Sequence[int]) -> list[Match]:
        """Return earlier occurrences of a context's last n tokens, for the largest n; longest, then latest first."""
        for n, latest, earlier in zip(self._orders, self._latest, self._earlier, strict=True):
            if len(context) < n:
                continue
            mask, matches = self._window - 1, []
            position = latest[hash(tuple(context[-n:])) & mask]
            for _ in range(_MAX_CHAIN):
                if position < max(self.length - self._window, 0):
                    break
                length = self._match_length(context, position)
                if length >= n and position + 1 < self.length:
                    matches.append(Match(length, position + 1))
                position = earlier[position & mask]
            if matches:
                return sorted(matches, key=lambda match: -match.length)
        return []

    def _match_length(self, context: Sequence[int], position: int) -> int:
        """Return how many of the last tokens of a context end at a position, `MAX_MATCH` at most."""
        tokens, mask = self._tokens, self._window - 1
        longest = min(len(context), MAX_MATCH, position - max(self.length - self._window, 0) + 1)
        for length in range(longest):
            if tokens[(position - length) & mask] != context[-1 - length]:
                return length
        return longest


class NgramDrafter:
    """Proposes the tokens that followed the latest earlier occurrence of a request's last tokens."""

    orders: Sequence[int] = (4, 3, 2)

    def __init__(self) -> None:
        self._texts: dict[str, tuple[Request, TokenIndex]] = {}

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a chain per row, empty where the last tokens did not occur before."""
        self.read([row.request for row in rows])
        return [chain(self._continue(row)) if row.num_draft_tokens else NO_DRAFT for row in rows]

    def read(self, requests: Sequence[Request]) -> None:
        """Index up to `MAX_READ` new tokens of requests."""
        room = MAX_READ
        for request in requests:
            if request.request_id not in self._texts:
                length = request.prompt_length + request.params.max_tokens
                window = min(1 << (length - 1).bit_length(), MAX_WINDOW)
                self._texts[request.request_id] = request, TokenIndex(window, self.orders)
            _, index = self._texts[request.request_id]
            tokens = request.token_ids[index.length : index.length + room]
            index.extend(tokens)
            room -= len(tokens)

    def release(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _continue(self, row: ProposeRow) -> list[int]:
        _, index = self._texts[row.request.request_id]
        matches = index.matches(row.request.token_ids[-MAX_MATCH:])
        if not matches:
            return []
        end = max(match.end for match in matches)
        tokens = (index.token(end + i) for i in range(row.num_draft_tokens))
        return [token for token in tokens if token is not None]
