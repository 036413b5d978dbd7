"""The counters of an engine, as vLLM's metrics define them: of drafts, and of the times and lengths of requests.

Acceptance rate = num_accepted_tokens / num_draft_tokens; mean acceptance length = 1 + num_accepted_tokens /
num_drafts (bonus included); acceptance at position i = num_accepted_tokens_per_pos[i] / num_drafts.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from engine.protocols import RequestOutput, ScheduledRow

REQUEST_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start; they only grow."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    """Tokens that were looked up in the prefix cache, when their requests were first admitted."""
    num_prefix_hits: int = 0
    """Looked-up tokens that were cached."""
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_rounds_by_length: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Rounds by draft length and by the reason for that length."""

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft; an empty draft does not count."""
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        missing = num_draft_tokens - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * missing
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per draft, bonus included; 1 before the first draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(slots=True)
class RunAheadStats:
    """Counters since the start; they only grow.

    Attributes:
        hits: proposals whose draft was at least partly prepared.
        misses: the remaining proposals, by reason. `token`: no draft was prepared for the committed token.
            `unprepared`: no time or no free blocks to prepare. `stale`: the request is new, or more than one verdict
            further.
        num_forwards: forward passes run ahead of proposals.
        num_wasted: of these, the passes whose results were not used.
    """

    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    num_forwards: int = 0
    num_wasted: int = 0


class Preparation:
    """Counts work that no round should wait for; 0 is wanted of each kind.

    `compiled`: layers and kernels, by a round. `not_recorded`: graphs that could not be recorded. `eager`: models that
    could not be compiled.
    """

    def __init__(self) -> None:
        self.counts = Counter(compiled=0, not_recorded=0, eager=0)
        self._is_expected = True  # until the first model is warmed up

    def observe(self, kind: str) -> None:
        """Count something that is compiled, unless that is `expected` now."""
        if not self._is_expected:
            self.counts[kind] += 1

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Within it no round waits; afterwards any round may."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False


PREPARATION = Preparation()
"""Of this process."""


class Distribution:
    """A histogram: the number of values up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def cumulative(self) -> list[int]:
        """The number of values up to each bound, then of all values."""
        return list(accumulate(self._counts))


def token_bounds(max_tokens: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, ... up to the first that is at least `max_tokens`."""
    bounds = [float(factor * 10**power) for power in range(10) for factor in (1, 2, 5)]
    return tuple(bounds[: bisect_left(bounds, max_tokens) + 1])


@dataclass(slots=True)
class _Times:
    """When something happened to a request, in seconds of the engine's clock; None: not yet."""

    added_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0


class RequestStats:
    """Counters since the start; they only grow.

    Attributes:
        queue_s: from `Engine.add` to the request's first round.
        prefill_s: from there to the first token.
        decode_s: from there to the last token, of requests that finished.
        output_token_s: decode_s per token after the first; 0 if there is only one token.
        inter_token_s: between two rounds that commit tokens of a request; a round can commit several.
        num_prompt_tokens, num_output_tokens: of requests that finished.
        num_computed_tokens: the prompt tokens that were not cached, of requests that finished.
        num_round_tokens: the tokens that a round computes, drafts included.
    """

    def __init__(self, max_model_len: int) -> None:
        """Count nothing yet; `max_model_len` is the largest number of tokens that is told from larger ones."""
        self.queue_s, self.prefill_s, self.decode_s = (Distribution(REQUEST_BOUNDS_S) for _ in range(3))
        self.output_token_s, self.inter_token_s = (Distribution(TOKEN_BOUNDS_S) for _ in range(2))
        bounds = token_bounds(max_model_len)
        self.num_prompt_tokens, self.num_output_tokens = Distribution(bounds), Distribution(bounds)
        self.num_computed_tokens, self.num_round_tokens = Distribution(bounds), Distribution(bounds)
        self._times: dict[str, _Times] = {}

    def add(self, request_id: str, now_s: float) -> None:
        """Begin to time a request, by the clock that also times the rounds."""
        self._times[request_id] = _Times(now_s)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._times.pop(request_id, None)

    def observe(
        self, batch: Sequence[ScheduledRow], outputs: Sequence[RequestOutput], *, started_s: float, ended_s: float
    ) -> None:
        """Count a round and its outputs."""
        num_draft_tokens = sum(output.num_draft_tokens for output in outputs)
        self.num_round_tokens.observe(sum(row.length for row in batch) + num_draft_tokens)
        requests = {row.request.request_id: row.request for row in batch}
        for request_id in requests:
            times = self._times.get(request_id)
            if times is not None and times.started_s is None:
                times.started_s = max(started_s, times.added_s)
                self.queue_s.observe(times.started_s - times.added_s)
        for output in outputs:
            times = self._times[output.request_id]
            assert times.started_s is not None
            if times.first_token_s is None:
                times.first_token_s = ended_s
                self.prefill_s.observe(ended_s - times.started_s)
            else:
                self.inter_token_s.observe(ended_s - times.last_token_s)
            times.last_token_s = ended_s
            if output.finish_reason is not None:
                self._observe_end(output, requests[output.request_id].num_output_tokens, ended_s - times.first_token_s)

    def _observe_end(self, output: RequestOutput, num_output_tokens: int, decode_s: float) -> None:
        self.decode_s.observe(decode_s)
        self.output_token_s.observe(decode_s / max(1, num_output_tokens - 1))
        self.num_prompt_tokens.observe(output.num_prompt_tokens)
        self.num_output_tokens.observe(num_output_tokens)
        self.num_computed_tokens.observe(max(0, output.num_prompt_tokens - output.num_cached_tokens))
