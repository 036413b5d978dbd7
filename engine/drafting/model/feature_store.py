"""FeatureStore: the target's features between the receiving thread and the cache of a draft worker.

Features belong to committed tokens and never change, so rows may come late, repeated or in pieces; the rows held are
always a prefix of the request's features.
"""

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

PATIENCE_S = 0.1
"""How long a draft waits for the last round's features, which are sent when the verdict is."""
_MAX_BYTES = 2**30
"""Limit on all rows that wait for a draft; beyond it, the request that was silent longest loses its rows."""


@dataclass(slots=True)
class _Features:
    """One request's features: how many are held and taken, the rows between, and how many the target has."""

    num_held: int = 0
    num_taken: int = 0
    end: int = 0
    rows: bytearray = field(default_factory=bytearray)


class FeatureStore:
    """Rows by request, until the drafter takes them; for one receiving and one drafting thread.

    dtype: torch's name of the rows' format; counts: `bytes` received, `waited` and `missing` (empty) drafts.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.dtype = ""
        self.counts = Counter(bytes=0, waited=0, missing=0)
        self._patience_s = patience_s
        self._row_bytes = 1
        self._features: OrderedDict[str, _Features] = OrderedDict()
        self._num_bytes = 0
        self._arrived = threading.Condition()
        self._is_silent = True
        """Nothing has come since the start, or since a wait in vain; then no draft waits."""

    def put(self, request_id: str, offset: int, end: int, rows: memoryview, *, dtype: str, row_bytes: int) -> bool:
        """Keep a request's rows from `offset` on, of `end` in all; return False if the rows before are missing."""
        with self._arrived:
            self.dtype, self._row_bytes, self._is_silent = dtype, row_bytes, False
            features = self._features.setdefault(request_id, _Features())
            self._features.move_to_end(request_id)
            features.end = end
            if has_those_before := offset <= features.num_held:
                new = rows[(features.num_held - offset) * row_bytes :]
                features.rows += new
                features.num_held += len(new) // row_bytes
                self._num_bytes += len(new)
            self.counts["bytes"] += len(rows)
            while self._num_bytes > _MAX_BYTES:
                self.forget(next(iter(self._features)))
            self._arrived.notify_all()
            return has_those_before

    def wait(self, request_id: str, count: int) -> bool:
        """Return whether a request's first `count` features are held, after waiting for rows that are on their way."""

        def is_decided() -> bool:
            features = self._features.get(request_id, _Features())
            return features.num_held >= count or features.end > features.num_held

        with self._arrived:
            if not self._is_silent and not is_decided():
                self.counts["waited"] += 1
                self._is_silent = not self._arrived.wait_for(is_decided, self._patience_s)
            is_held = self._features.get(request_id, _Features()).num_held >= count
            self.counts["missing"] += not is_held
            return is_held

    def num_taken(self, request_id: str) -> int:
        """Return how many of a request's features the cache holds."""
        with self._arrived:
            return self._features.get(request_id, _Features()).num_taken

    def take(self, request_id: str, count: int) -> tuple[int, bytearray]:
        """Hand over the untaken rows of the first `count` features; return the first row's index and the rows."""
        with self._arrived:
            features = self._features.get(request_id, _Features())
            start, size = features.num_taken, max(count - features.num_taken, 0) * self._row_bytes
            taken = features.rows[:size]
            del features.rows[:size]
            features.num_taken += len(taken) // self._row_bytes
            self._num_bytes -= len(taken)
            return start, taken

    def forget(self, request_id: str) -> None:
        with self._arrived:
            self._num_bytes -= len(self._features.pop(request_id, _Features()).rows)
