"""How long rounds waited for the workers, and how long target and draft may take, learned from earlier rounds."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from engine.protocols import VerifyRow

_NUM_ROUNDS, _FACTOR, _LEAST_S = 8, 20, 5.0
_MAX_SHAPES = 1024
_DRAFT_FACTOR, _LEAST_DRAFT_S = 4, 0.2
"""`_LEAST_DRAFT_S` is longer than a garbage collection or any other pause of a healthy process."""
_NUM_DRAFTS = 16

Shape = tuple[object, ...]


@dataclass(slots=True)
class Calls:
    """Counters of the rounds that called a worker.

    Attributes:
        compute_s: of `wait_s`, the seconds that the worker computed; for a target, rank 0.
        num_hits: rounds whose drafts run-ahead had all prepared.
        num_misses: rounds that lacked a prepared draft.
    """

    wait_s: float = 0.0
    compute_s: float = 0.0
    num_hits: int = 0
    num_misses: int = 0

    def since(self, before: "Calls") -> "Calls":
        return Calls(*(getattr(self, entry.name) - getattr(before, entry.name) for entry in fields(self)))


class RoundTimes:
    """Measured rounds by their shape; the deadline of the next round follows from them.

    The first eight rounds of a shape get the whole timeout, because they may compile kernels. Later rounds get 20 times
    the longest of the last eight, but at least 5 s. A round with a part of a prompt has no shape: prompts differ in
    size, and the first pass of a request may compile its grammar.
    """

    def __init__(self) -> None:
        self._seconds: dict[Shape | None, deque[float]] = {}

    def deadline_s(self, shape: Shape | None, timeout_s: float) -> float:
        """Return the seconds that a round may take; `shape` is None if it has none."""
        seconds = self._seconds.get(shape, ())
        if len(seconds) < _NUM_ROUNDS:
            return timeout_s
        return min(timeout_s, max(_LEAST_S, _FACTOR * max(seconds)))

    def observe(self, shape: Shape | None, seconds: float) -> None:
        if shape is None:
            return
        self._seconds[shape] = rounds = self._seconds.pop(shape, None) or deque(maxlen=_NUM_ROUNDS)
        rounds.append(seconds)
        if len(self._seconds) > _MAX_SHAPES:
            del self._seconds[next(iter(self._seconds))]


def shape_of(rows: Sequence[VerifyRow]) -> Shape | None:
    """Return what decides which kernels a round runs, and how long; None if it computes a part of a prompt."""
    lengths, longest, kinds = [], 0, set()
    for row in rows:
        if row.start < row.request.prompt_length:
            return None
        lengths.append(row.length + len(row.draft.token_ids) + row.draft.num_deferred)
        longest = max(longest, row.start + lengths[-1])
        p = row.request.params
        is_cut = (p.top_p < 1, p.top_k > 0, p.min_p > 0, p.has_penalties, bool(p.logit_bias), p.grammar is not None)
        kinds.add((row.draft.is_chain, p.temperature > 0, p.logprobs is not None, *is_cut))
    return len(lengths), sum(lengths), max(lengths), longest.bit_length(), frozenset(kinds)


class DraftTimes:
    """How long recent rounds waited for their drafts."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_NUM_DRAFTS)

    def deadline_s(self, limit_s: float) -> float:
        """Return the seconds that drafts may take: 4 times the longest recent wait, but at least 0.2 s."""
        if len(self._waits) < _NUM_ROUNDS:
            return limit_s
        return min(limit_s, max(_LEAST_DRAFT_S, _DRAFT_FACTOR * max(self._waits)))

    def observe(self, seconds: float) -> None:
        self._waits.append(seconds)
