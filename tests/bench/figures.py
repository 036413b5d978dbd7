"""What one batch took, and the row that a cell's batches become: medians over them, acceptance over all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from operator import add, sub
from statistics import median
from typing import Protocol

from tests.bench.workload import Cell, Workload
from tests.load.records import Acceptance


@dataclass(slots=True)
class Timeline:
    """When the tokens of one request arrived."""

    started_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.arrivals_s[0] - self.started_s


@dataclass(frozen=True, slots=True)
class RoundSplit:
    """Mean times of the rounds that computed no prompt, in seconds; what is not named here was spent in scheduling.

    Attributes:
        target_s, draft_s: the two models, with what surrounds their passes in the processes that they compute in.
        wire_s: what else the Router waited for the two; 0 in one process.
        delivery_s: giving tokens to the streams, and letting other tasks run; 0 in one process.
    """

    num_rounds: int
    round_s: float
    target_s: float
    draft_s: float
    wire_s: float = 0.0
    delivery_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunAhead:
    """Counts of drafts that were prepared when they were asked for (hits) and of others.

    Attributes:
        hit_rounds, miss_rounds: rounds in which all drafts were prepared, and those in which one was not.
        hit_wait_s, miss_wait_s: seconds that these rounds waited for their drafts, all together.
    """

    hits: int = 0
    misses: int = 0
    hit_rounds: int = 0
    miss_rounds: int = 0
    hit_wait_s: float = 0.0
    miss_wait_s: float = 0.0

    def __add__(self, other: "RunAhead") -> "RunAhead":
        return RunAhead(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: "RunAhead") -> "RunAhead":
        return RunAhead(*map(sub, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Batch:
    """One timed batch; a `split` or `run_ahead` of None does not apply. `cpu_s` is CPU time by process."""

    elapsed_s: float
    timelines: Sequence[Timeline]
    acceptance: Acceptance
    split: RoundSplit | None = None
    run_ahead: RunAhead | None = None
    cpu_s: dict[str, float] = field(default_factory=dict)


class Method(Protocol):
    """A way to generate. `num_speculative_tokens` is None where the method chooses the draft length itself."""

    num_speculative_tokens: int | None

    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        """Continue the prompts together, each by the workload's number of tokens, and decode the text."""
        ...

    def close(self) -> None:
        """Stop what was started."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table and of the JSON; None where a figure does not apply. Times of a round are medians of means.

    Attributes:
        ttft_last_ms: time to the first token of the last request of a batch to get one.
        round_overhead_ms: what a round takes besides draft and target: `wire_ms`, `delivery_ms` and scheduling.
        rows_per_round: requests in a round without prompts, on average.
        hit_rounds: share of the rounds in which all drafts were prepared.
        hit_wait_ms, miss_wait_ms: mean time that these and the others waited for their drafts.
        cpu_us: CPU time per generated token, by process.
        tokens_per_s_by_turn: methods side by side had their turns at the same times.
    """

    name: str
    batch_size: int
    temperature: float
    num_speculative_tokens: int | None
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    round_ms: float | None = None
    round_overhead_ms: float | None = None
    draft_ms: float | None = None
    target_ms: float | None = None
    wire_ms: float | None = None
    scheduling_ms: float | None = None
    delivery_ms: float | None = None
    rows_per_round: float | None = None
    hit_rate: float | None = None
    hit_rounds: float | None = None
    hit_wait_ms: float | None = None
    miss_wait_ms: float | None = None
    ttft_last_ms: float = 0.0
    cpu_us: dict[str, float] = field(default_factory=dict)
    tokens_per_s_by_turn: list[float] = field(default_factory=list)

    @property
    def cell(self) -> Cell:
        return Cell(self.batch_size, self.temperature)


def row_of(
    name: str, num_speculative_tokens: int | None, workload: Workload, cell: Cell, timed: Sequence[Batch]
) -> Row:
    num_tokens = cell.batch_size * workload.num_tokens
    timelines = [timeline for batch in timed for timeline in batch.timelines]
    decoding_s = [timeline.arrivals_s[-1] - timeline.arrivals_s[0] for timeline in timelines]
    acceptance = sum((batch.acceptance for batch in timed), Acceptance())
    rates = [num_tokens / batch.elapsed_s for batch in timed]
    splits = [batch.split for batch in timed if batch.split is not None]
    ahead = sum((batch.run_ahead for batch in timed if batch.run_ahead is not None), RunAhead())
    # The first tokens come out of rounds with prompts.
    num_row_rounds = (num_tokens - cell.batch_size) / (acceptance.mean_length or 1.0) * len(splits)
    return Row(
        name,
        cell.batch_size,
        cell.temperature,
        num_speculative_tokens,
        tokens_per_s=median(rates),
        ttft_ms=median(timeline.first_s * 1e3 for timeline in timelines),
        tpot_ms=median(decoding_s) * 1e3 / (workload.num_tokens - 1),
        acceptance_rate=acceptance.rate,
        mean_acceptance_length=acceptance.mean_length,
        round_ms=_median_ms(s.round_s for s in splits),
        round_overhead_ms=_median_ms(s.round_s - s.target_s - s.draft_s for s in splits),
        draft_ms=_median_ms(s.draft_s for s in splits),
        target_ms=_median_ms(s.target_s for s in splits),
        wire_ms=_median_ms(s.wire_s for s in splits),
        scheduling_ms=_median_ms(s.round_s - s.target_s - s.draft_s - s.wire_s - s.delivery_s for s in splits),
        delivery_ms=_median_ms(s.delivery_s for s in splits),
        rows_per_round=num_row_rounds / sum(split.num_rounds for split in splits) if splits else None,
        hit_rate=_ratio(ahead.hits, ahead.hits + ahead.misses),
        hit_rounds=_ratio(ahead.hit_rounds, ahead.hit_rounds + ahead.miss_rounds),
        hit_wait_ms=_ratio(ahead.hit_wait_s * 1e3, ahead.hit_rounds),
        miss_wait_ms=_ratio(ahead.miss_wait_s * 1e3, ahead.miss_rounds),
        ttft_last_ms=median(max(timeline.first_s for timeline in batch.timelines) * 1e3 for batch in timed),
        cpu_us={
            process: median(batch.cpu_s[process] for batch in timed) * 1e6 / num_tokens for process in timed[0].cpu_s
        },
        tokens_per_s_by_turn=rates,
    )


def paired_ratio(over: Row, under: Row) -> float:
    """Return the median over the turns of two methods side by side of the ratio of their tokens/s.

    The machine's speed drifts over minutes, which both of a turn share; a ratio of medians would hold the drift.
    """
    pairs = zip(over.tokens_per_s_by_turn, under.tokens_per_s_by_turn, strict=True)
    return median(first / second for first, second in pairs)


def figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _median_ms(seconds: Iterable[float]) -> float | None:
    values = [value * 1e3 for value in seconds]
    return median(values) if values else None


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None
