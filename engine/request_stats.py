"""RequestStats: how long sequences wait and take, and how many tokens they have, as vLLM's metrics define it."""

from bisect import bisect_left
from collections.abc import Sequence as Items
from itertools import accumulate

from engine.scheduler import ScheduledRow
from engine.sequence import RequestOutput, Sequence

REQUEST_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Distribution:
    """A histogram: how many values are at most each bound, and their sum."""

    def __init__(self, bounds: Items[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def cumulative(self) -> list[int]:
        """How many values are at most each bound; last, how many there are."""
        return list(accumulate(self._counts))


def token_bounds(most: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, ... up to the first that is at least `most`."""
    bounds: list[float] = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            bounds.append(float(factor * power))
            if bounds[-1] >= most:
                return tuple(bounds)
        power *= 10


class RequestStats:
    """Counters since the start; they only grow.

    Attributes:
        queue_s: from `Engine.add` to the first round with the sequence.
        prefill_s: from there to the first token.
        decode_s: from there to the last token, of sequences that finished.
        output_token_s: that per token after the first, of sequences that finished; 0 if there is only one token.
        inter_token_s: between two rounds that commit tokens of a sequence; a round can commit several.
        num_prompt_tokens, num_output_tokens: of sequences that finished.
        num_computed_tokens: the prompt tokens that were not cached, of sequences that finished.
        num_round_tokens: the tokens that a round computes, drafts included.
    """

    def __init__(self, max_model_len: int) -> None:
        """Count nothing yet; `max_model_len` is the largest number of tokens that is told from larger ones."""
        self.queue_s = Distribution(REQUEST_BOUNDS_S)
        self.prefill_s = Distribution(REQUEST_BOUNDS_S)
        self.decode_s = Distribution(REQUEST_BOUNDS_S)
        self.output_token_s = Distribution(TOKEN_BOUNDS_S)
        self.inter_token_s = Distribution(TOKEN_BOUNDS_S)
        bounds = token_bounds(max_model_len)
        self.num_prompt_tokens = Distribution(bounds)
        self.num_output_tokens = Distribution(bounds)
        self.num_computed_tokens = Distribution(bounds)
        self.num_round_tokens = Distribution(bounds)

    def observe(
        self, rows: Items[ScheduledRow], outputs: Items[RequestOutput], *, started_s: float, ended_s: float
    ) -> None:
        """Count a round.

        Args:
            rows: the round's.
            outputs: what it committed.
            started_s, ended_s: when the round began and ended, by the clock that also sets `Times.added_s`.
        """
        sequences = {row.sequence.request.request_id: row.sequence for row in rows}
        num_draft_tokens = sum(output.num_draft_tokens for output in outputs)
        self.num_round_tokens.observe(sum(row.length for row in rows) + num_draft_tokens)
        for sequence in sequences.values():
            if sequence.times.started_s is None:
                sequence.times.started_s = max(started_s, sequence.times.added_s)
                self.queue_s.observe(sequence.times.started_s - sequence.times.added_s)
        for output in outputs:
            self._observe_tokens(sequences[output.request_id], ended_s)
            if output.finish_reason is not None:
                self._observe_end(sequences[output.request_id])

    def _observe_tokens(self, sequence: Sequence, now_s: float) -> None:
        times = sequence.times
        assert times.started_s is not None
        if times.first_token_s is None:
            times.first_token_s = now_s
            self.prefill_s.observe(now_s - times.started_s)
        else:
            self.inter_token_s.observe(now_s - times.last_token_s)
        times.last_token_s = now_s

    def _observe_end(self, sequence: Sequence) -> None:
        times = sequence.times
        assert times.first_token_s is not None
        decode_s = times.last_token_s - times.first_token_s
        self.decode_s.observe(decode_s)
        self.output_token_s.observe(decode_s / max(1, sequence.num_output_tokens - 1))
        num_prompt_tokens = sequence.request.num_prompt_tokens
        self.num_prompt_tokens.observe(num_prompt_tokens)
        self.num_output_tokens.observe(sequence.num_output_tokens)
        self.num_computed_tokens.observe(max(0, num_prompt_tokens - sequence.num_cached))
