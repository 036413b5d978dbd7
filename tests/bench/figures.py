"""What one batch took, and the row that a cell's batches become: medians over them, acceptance over all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
class Batch:
    """One timed batch.

    Attributes:
        overhead_s: mean time of a round outside the two models, None where there are none.
        draft_s, target_s: mean time of a round that each model computed, None where nobody says.
        hits, misses: drafts that were prepared when they were asked for, and those that were not.
    """

    elapsed_s: float
    timelines: Sequence[Timeline]
    speculation: SpeculationStats
    overhead_s: float | None = None
    draft_s: float | None = None
    target_s: float | None = None
    hits: int = 0
    misses: int = 0


class Method(Protocol):
    """A way to generate. `num_speculative_tokens` is None where the method chooses the draft length itself."""

    num_speculative_tokens: int | None

    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        """Continue the prompts together, each by the workload's number of tokens, down to the text."""
        ...

    def close(self) -> None:
        """Stop what was started."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table and of the JSON; None where a figure does not apply."""

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
    hit_rate: float | None = None
    num_prompt_tokens: int | None = None
    is_last_late: bool = False
    tokens_per_s_by_turn: list[float] = field(default_factory=list)
    """What `tokens_per_s` is the median of; methods side by side had their turns at the same times."""

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
    hits = sum(batch.hits for batch in timed)
    rates = [cell.batch_size * workload.num_tokens / batch.elapsed_s for batch in timed]
    overheads = [batch.overhead_s * 1e3 for batch in timed if batch.overhead_s is not None]
    return Row(
        name=name,
        batch_size=cell.batch_size,
        temperature=cell.temperature,
        num_speculative_tokens=num_speculative_tokens,
        tokens_per_s=median(rates),
        ttft_ms=median(timeline.first_s * 1e3 for timeline in timelines),
        tpot_ms=median(timeline.decoding_s * 1e3 / (workload.num_tokens - 1) for timeline in timelines),
        acceptance_rate=num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
        mean_acceptance_length=1 + num_accepted_tokens / num_drafts if num_drafts else None,
        round_overhead_ms=median(overheads) if overheads else None,
        draft_ms=_median_ms(batch.draft_s for batch in timed),
        target_ms=_median_ms(batch.target_s for batch in timed),
        hit_rate=hits / asked if (asked := hits + sum(batch.misses for batch in timed)) else None,
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


def since(before: SpeculationStats, after: SpeculationStats) -> SpeculationStats:
    """Return what was counted between two readings."""
    return SpeculationStats(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        num_generation_tokens=after.num_generation_tokens - before.num_generation_tokens,
        num_rounds=after.num_rounds - before.num_rounds,
    )
