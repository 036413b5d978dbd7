"""How long rounds waited for the workers, and how long target and draft may take, learned from earlier rounds."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from engine.protocols import VerifyRow

_NUM_ROUNDS, _MAX_SHAPES = 8, 1024

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

    factor, least_s, num_kept = 20, 5.0, _NUM_ROUNDS

    def __init__(self) -> None:
        self._seconds: dict[Shape | None, deque[float]] = {}

    def deadline_s(self, shape: Shape | None, timeout_s: float) -> float:
        """Return the seconds that a round may take; `shape` is None if it has none."""
        seconds = self._seconds.get(shape, ())
        if len(seconds) < _NUM_ROUNDS:
            return timeout_s
        return min(timeout_s, max(self.least_s, self.factor * max(seconds)))

    def observe(self, shape: Shape | None, seconds: float) -> None:
        if shape is None:
            return
        self._seconds[shape] = rounds = self._seconds.pop(shape, None) or deque(maxlen=self.num_kept)
        rounds.append(seconds)
        if len(self._seconds) > _MAX_SHAPES:
            del self._seconds[next(iter(self._seconds))]


class DraftTimes(RoundTimes):
    """How long rounds waited for their drafts, all of one shape; pauses of a healthy process are shorter than 0.2 s."""

    factor, least_s, num_kept = 4, 0.2, 16


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
