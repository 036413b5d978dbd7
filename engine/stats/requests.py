"""Histograms of the times and lengths of requests, as vLLM's metrics define them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.protocols import ScheduledRow
from engine.requests.output import RequestOutput

REQUEST_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Distribution:
    """A histogram, and the sum of its values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def cumulative(self) -> list[int]:
        return list(accumulate(self._counts))


def token_bounds(max_tokens: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, ... up to the first that is at least `max_tokens`."""
    bounds = [float(factor * 10**power) for power in range(10) for factor in (1, 2, 5)]
    return tuple(bounds[: bisect_left(bounds, max_tokens) + 1])


@dataclass(slots=True)
class _Times:
    added_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0


class RequestStats:
    """Histograms since the start.

    Attributes:
        queue_s: from `Engine.add` to the request's first round.
        prefill_s: from the first round to the first token.
        decode_s, output_token_s: from the first token to the last, in all and per token after the first.
        inter_token_s: between two rounds that commit tokens of a request; a round can commit several tokens.
        num_computed_tokens: a finished request's prompt tokens that were not cached.
        num_round_tokens: the tokens that a round computes, drafts included.
    """

    def __init__(self, max_model_len: int) -> None:
        self.queue_s, self.prefill_s, self.decode_s = (Distribution(REQUEST_BOUNDS_S) for _ in range(3))
        self.output_token_s, self.inter_token_s = (Distribution(TOKEN_BOUNDS_S) for _ in range(2))
        bounds = token_bounds(max_model_len)
        self.num_prompt_tokens, self.num_output_tokens = Distribution(bounds), Distribution(bounds)
        self.num_computed_tokens, self.num_round_tokens = Distribution(bounds), Distribution(bounds)
        self._times: dict[str, _Times] = {}

    def add(self, request_id: str, now_s: float) -> None:
        self._times[request_id] = _Times(now_s)

    def release(self, request_id: str) -> None:
        self._times.pop(request_id, None)

    def observe(
        self, batch: Sequence[ScheduledRow], outputs: Sequence[RequestOutput], *, started_s: float, ended_s: float
    ) -> None:
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
