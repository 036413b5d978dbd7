"""TokenIndex: the last tokens of a text, and where its n-grams occurred, found as LZ77 compressors find matches.

For each n, a hash table holds the latest position of an n-gram, and a chain leads from each position to the one before
it with the same hash. A token costs about a microsecond to add and nothing to evict: old positions are overwritten.

Why not a suffix tree or automaton: in Python, each of them takes several dictionaries per token. Only occurrences that
share the last n tokens of a context are found here, for the largest n that has any, which are the longest matches.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

MAX_MATCH = 32
"""Tokens of a context that are compared at most."""
_MAX_CHAIN = 16
"""Earlier occurrences that are looked at, the latest first."""


class Match(NamedTuple):
    """An earlier occurrence of the end of a context: how many tokens agree, and the position after them."""

    length: int
    end: int


class TokenIndex:
    """The last `window` tokens of a text. Positions count from the start of the text."""

    def __init__(self, window: int, orders: Sequence[int]) -> None:
        """Make an empty index.

        Args:
            window: a power of two.
            orders: the lengths n of the n-grams, in descending order.
        """
        assert window & (window - 1) == 0
        self.length = 0
        self._window = window
        self._orders = orders
        self._tokens = array("i", bytes(4 * window))
        self._latest = [array("q", [-1]) * window for _ in orders]
        self._earlier = [array("q", [-1]) * window for _ in orders]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        mask, tokens = self._window - 1, self._tokens
        text = [*self.tail(self._orders[0] - 1), *token_ids]
        num_known = len(text) - len(token_ids)
        tables = list(zip(self._orders, self._latest, self._earlier, strict=True))
        for i in range(num_known, len(text)):
            position = self.length
            place = position & mask
            tokens[place] = text[i]
            for n, latest, earlier in tables:
                if i + 1 < n:
                    continue
                slot = hash(tuple(text[i + 1 - n : i + 1])) & mask
                earlier[place] = latest[slot]
                latest[slot] = position
            self.length += 1

    def tail(self, count: int) -> list[int]:
        """Return the last `count` tokens, or as many as there are."""
        start = max(self.length - min(count, self._window), 0)
        return [self._tokens[position & (self._window - 1)] for position in range(start, self.length)]

    def token(self, position: int) -> int | None:
        """Return the token at a position; None at the end of the text."""
        return self._tokens[position & (self._window - 1)] if position < self.length else None

    def matches(self, context: Sequence[int]) -> list[Match]:
        """Return earlier occurrences of the end of a context, longest first, and the latest first among equals.

        They share at least the last n tokens, for the largest order n for which there are any.
        """
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
        most = min(len(context), MAX_MATCH, position - max(self.length - self._window, 0) + 1)
        for length in range(most):
            if tokens[(position - length) & mask] != context[-1 - length]:
                return length
        return most
