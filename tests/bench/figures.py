"""What one batch took, and the row that a cell's batches become: medians over them, acceptance over all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import Protocol

from engine.stats import SpeculationStats
from tests.bench.workload import Cell, Workload


@dataclass(slots=True)
class Timeline:
    """When the tokens of one request arrived."""

    started_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.arrivals_s[0] - self.started_s

    @property
    def decoding_s(self) -> float:
        return self.arrivals_s[-1] - self.arrivals_s[0]


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

    @property
    def overhead_s(self) -> float:
        return self.round_s - self.target_s - self.draft_s

    @property
    def scheduling_s(self) -> float:
        return self.overhead_s - self.wire_s - self.delivery_s


@dataclass(frozen=True, slots=True)
class RunAhead:
    """What running ahead made of some drafts.

    Attributes:
        hits, misses: drafts that were prepared when they were asked for, and those that were not.
        hit_rounds, miss_rounds: rounds in which all drafts were prepared, and those in which one was not.
        hit_wait_s, miss_wait_s: seconds that these rounds waited for their drafts, all together.
    """

    hits: int
    misses: int
    hit_rounds: int
    miss_rounds: int
    hit_wait_s: float
    miss_wait_s: float

    def __add__(self, other: "RunAhead") -> "RunAhead":
        return RunAhead(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def since(self, before: "RunAhead") -> "RunAhead":
        return RunAhead(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class Batch:
    """One timed batch.

    Attributes:
        split: where the time of a round went, None where there are no rounds or nobody says.
        front_s: time outside of all rounds: the requests' way in, the last answers' way out.
        run_ahead: None where nobody runs ahead.
        cpu_s: CPU time by process, as `processes.NAMES` and `client`.
    """

    elapsed_s: float
    timelines: Sequence[Timeline]
    speculation: SpeculationStats
    split: RoundSplit | None = None
    front_s: float | None = None
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
        front_ms: what a batch takes outside of its rounds.
        rows_per_round: requests in a round without prompts, on average.
        hit_rounds: share of the rounds in which all drafts were prepared.
        hit_wait_ms, miss_wait_ms: mean time that these and the others waited for their drafts.
        cpu_us: CPU time per generated token, by process.
        tokens_per_s_by_turn: what `tokens_per_s` is the median of; methods side by side had their turns at the same
            times.
    """

    name: str
    batch_size: int
    temperature: float
    num_speculative_tokens: int | None
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    round_overhead_ms: float | None
    draft_ms: float | None = None
    target_ms: float | None = None
    wire_ms: float | None = None
    delivery_ms: float | None = None
    front_ms: float | None = None
    rows_per_round: float | None = None
    hit_rate: float | None = None
    hit_rounds: float | None = None
    hit_wait_ms: float | None = None
    miss_wait_ms: float | None = None
    ttft_last_ms: float = 0.0
    cpu_us: dict[str, float] = field(default_factory=dict)
    num_prompt_tokens: int | None = None
    is_last_late: bool = False
    tokens_per_s_by_turn: list[float] = field(default_factory=list)

    @property
    def scheduling_ms(self) -> float | None:
        if self.round_overhead_ms is None or self.wire_ms is None or self.delivery_ms is None:
            return None
        return self.round_overhead_ms - self.wire_ms - self.delivery_ms

    @property
    def round_ms(self) -> float | None:
        if self.round_overhead_ms is None or self.target_ms is None or self.draft_ms is None:
            return None
        return self.round_overhead_ms + self.target_ms + self.draft_ms

    @property
    def cell(self) -> Cell:
        return Cell(self.batch_size, self.temperature, self.num_prompt_tokens, self.is_last_late)


def measure(name: str, method: Method, workload: Workload, cell: Cell) -> Row:
    """Warm a cell up with its own first batch, then time all its batches."""
    batches = list(workload.batches(cell))
    method.run(batches[0], cell)
    timed = [method.run(prompts, cell) for prompts in batches]
    return row_of(name, method.num_speculative_tokens, workload, cell, timed)


def row_of(
    name: str, num_speculative_tokens: int | None, workload: Workload, cell: Cell, timed: Sequence[Batch]
) -> Row:
    """Return the row that a cell's timed batches become."""
    timelines = [timeline for batch in timed for timeline in batch.timelines[-1 if cell.is_last_late else 0 :]]
    num_drafts = sum(batch.speculation.num_drafts for batch in timed)
    num_draft_tokens = sum(batch.speculation.num_draft_tokens for batch in timed)
    num_accepted_tokens = sum(batch.speculation.num_accepted_tokens for batch in timed)
    rates = [cell.batch_size * workload.num_tokens / batch.elapsed_s for batch in timed]
    length = 1 + num_accepted_tokens / num_drafts if num_drafts else None
    splits = [batch.split for batch in timed if batch.split is not None]
    ahead = _sum_of(batch.run_ahead for batch in timed)
    # The first tokens come out of rounds with prompts.
    num_row_rounds = cell.batch_size * (workload.num_tokens - 1) / (length or 1.0) * len(splits)
    return Row(
        name=name,
        batch_size=cell.batch_size,
        temperature=cell.temperature,
        num_speculative_tokens=num_speculative_tokens,
        tokens_per_s=median(rates),
        ttft_ms=median(timeline.first_s * 1e3 for timeline in timelines),
        tpot_ms=median(timeline.decoding_s * 1e3 / (workload.num_tokens - 1) for timeline in timelines),
        acceptance_rate=num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
        mean_acceptance_length=length,
        round_overhead_ms=_median_ms(split.overhead_s for split in splits),
        draft_ms=_median_ms(split.draft_s for split in splits),
        target_ms=_median_ms(split.target_s for split in splits),
        wire_ms=_median_ms(split.wire_s for split in splits),
        delivery_ms=_median_ms(split.delivery_s for split in splits),
        front_ms=_median_ms(batch.front_s for batch in timed),
        rows_per_round=num_row_rounds / sum(split.num_rounds for split in splits) if splits else None,
        hit_rate=_ratio(ahead.hits, ahead.hits + ahead.misses),
        hit_rounds=_ratio(ahead.hit_rounds, ahead.hit_rounds + ahead.miss_rounds),
        hit_wait_ms=_ratio(ahead.hit_wait_s * 1e3, ahead.hit_rounds),
        miss_wait_ms=_ratio(ahead.miss_wait_s * 1e3, ahead.miss_rounds),
        ttft_last_ms=median(max(timeline.first_s for timeline in batch.timelines) * 1e3 for batch in timed),
        cpu_us={
            name: median(batch.cpu_s[name] for batch in timed) * 1e6 / (cell.batch_size * workload.num_tokens)
            for name in timed[0].cpu_s
        },
        num_prompt_tokens=cell.num_prompt_tokens,
        is_last_late=cell.is_last_late,
        tokens_per_s_by_turn=rates,
    )


def paired_ratio(over: Row, under: Row) -> float:
    """Return the median over the turns of two methods side by side of the ratio of their tokens/s.

    The machine's speed drifts over minutes, which both of a turn share; a ratio of medians would hold the drift.
    """
    pairs = zip(over.tokens_per_s_by_turn, under.tokens_per_s_by_turn, strict=True)
    return median(first / second for first, second in pairs)


def _median_ms(seconds: Iterable[float | None]) -> float | None:
    known = [value * 1e3 for value in seconds if value is not None]
    return median(known) if known else None


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _sum_of(counters: Iterable[RunAhead | None]) -> RunAhead:
    return sum((counter for counter in counters if counter is not None), RunAhead(0, 0, 0, 0, 0.0, 0.0))


def since(before: SpeculationStats, after: SpeculationStats) -> SpeculationStats:
    """Return what was counted between two readings."""
    return SpeculationStats(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        num_generation_tokens=after.num_generation_tokens - before.num_generation_tokens,
        num_rounds=after.num_rounds - before.num_rounds,
    )
