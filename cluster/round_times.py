"""How long rounds waited for the workers, and how long target and draft may take, learned from earlier rounds."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from engine.protocols import VerifyRow

_NUM_ROUNDS, _FACTOR, _LEAST_S = 8, 20, 5.0
_MAX_SHAPES = 1024
_DRAFT_FACTOR, _LEAST_DRAFT_S = 4, 0.2
"""The least is longer than a garbage collection, or whatever else may stop a healthy process for a moment."""
_NUM_DRAFTS = 16

Shape = tuple[object, ...]


@dataclass(slots=True)
class Calls:
    """Counters of the rounds that called a worker, since the start.

    Attributes:
        wait_s: seconds from the calls to their replies.
        compute_s: of these, the seconds that the worker computed; for a target, rank 0.
        num_hits, num_misses: rounds whose drafts a run-ahead worker had all prepared, and all other rounds.
    """

    wait_s: float = 0.0
    compute_s: float = 0.0
    num_hits: int = 0
    num_misses: int = 0

    def since(self, before: "Calls") -> "Calls":
        """Return the counts since `before`."""
        return Calls(*(getattr(self, entry.name) - getattr(before, entry.name) for entry in fields(self)))


class RoundTimes:
    """Measured rounds by their shape, since the target's ranks started; the deadline of the next follows from them.

    A round must end within the configured timeout until eight of its shape were measured; then within 20 times the
    longest of the last eight, but never less than 5 s or more than the timeout. So whatever is larger than all before
    it, or may be the first to compile a kernel, gets the whole timeout. A round with a part of a prompt has no shape:
    prompts differ in size, and the first pass of a request may compile its grammar.
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
        """Record a round; of many shapes, those that were not seen for the longest time are forgotten."""
        if shape is None:
            return
        self._seconds[shape] = rounds = self._seconds.pop(shape, None) or deque(maxlen=_NUM_ROUNDS)
        rounds.append(seconds)
        if len(self._seconds) > _MAX_SHAPES:
            del self._seconds[next(iter(self._seconds))]


def shape_of(rows: Sequence[VerifyRow]) -> Shape | None:
    """Return all that decides which kernels a round runs, and how long; None if it computes a part of a prompt.

    Contexts count by powers of two, and rows by what is drawn for them.
    """
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
        """Return the seconds that drafts may take: 4 times the longest of recent waits, but 0.2 s or more."""
        if len(self._waits) < _NUM_ROUNDS:
            return limit_s
        return min(limit_s, max(_LEAST_DRAFT_S, _DRAFT_FACTOR * max(self._waits)))

    def observe(self, seconds: float) -> None:
        """Record a wait."""
        self._waits.append(seconds)
