"""What one batch took, and the row that a cell's batches become: medians over them, acceptance over all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from tests.bench.workload import Cell, Workload
from tests.load.records import Acceptance


@dataclass(frozen=True, slots=True)
class RoundSplit:
    """Mean times of the rounds that computed no prompt, in seconds.

    Attributes:
        target_s, draft_s: the two models, with what surrounds their passes in the processes that they compute in.
        hit_share: rounds in which a draft that runs ahead had prepared all drafts; None if it does not run ahead.
    """

    num_rounds: int
    round_s: float
    target_s: float
    draft_s: float
    hit_share: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One timed batch; a `split` of None does not apply. `texts` are token ids to audit, or none."""

    elapsed_s: float
    acceptance: Acceptance
    split: RoundSplit | None = None
    texts: list[list[int]] = field(default_factory=list)


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
        round_overhead_ms: what a round takes besides draft and target.
        rows_per_round: requests in a round without prompts, on average.
        hit_share: as of `RoundSplit`.
        tokens_per_s_by_turn: methods side by side had their turns at the same times.
        texts: of the first batch; they are not in the JSON.
    """

    name: str
    batch_size: int
    temperature: float
    num_speculative_tokens: int | None
    tokens_per_s: float
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    round_ms: float | None = None
    round_overhead_ms: float | None = None
    draft_ms: float | None = None
    target_ms: float | None = None
    rows_per_round: float | None = None
    hit_share: float | None = None
    tokens_per_s_by_turn: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list, compare=False)

    @property
    def cell(self) -> Cell:
        return Cell(self.batch_size, self.temperature)


def row_of(
    name: str, num_speculative_tokens: int | None, workload: Workload, cell: Cell, timed: Sequence[Batch]
) -> Row:
    num_tokens = cell.batch_size * workload.num_tokens
    acceptance = sum((batch.acceptance for batch in timed), Acceptance())
    rates = [num_tokens / batch.elapsed_s for batch in timed]
    splits = [batch.split for batch in timed if batch.split is not None]
    # The first tokens come out of rounds with prompts.
    num_row_rounds = (num_tokens - cell.batch_size) / (acceptance.mean_length or 1.0) * len(splits)
    return Row(
        name,
        cell.batch_size,
        cell.temperature,
        num_speculative_tokens,
        tokens_per_s=median(rates),
        acceptance_rate=acceptance.rate,
        mean_acceptance_length=acceptance.mean_length,
        round_ms=_median(split.round_s * 1e3 for split in splits),
        round_overhead_ms=_median((split.round_s - split.target_s - split.draft_s) * 1e3 for split in splits),
        draft_ms=_median(split.draft_s * 1e3 for split in splits),
        target_ms=_median(split.target_s * 1e3 for split in splits),
        rows_per_round=num_row_rounds / sum(split.num_rounds for split in splits) if splits else None,
        hit_share=_median(split.hit_share for split in splits if split.hit_share is not None),
        tokens_per_s_by_turn=rates,
        texts=timed[0].texts,
    )


def paired_ratio(over: Row, under: Row) -> float:
    """Return the median over the turns of two methods side by side of the ratio of their tokens/s.

    The machine's speed drifts over minutes, which both of a turn share; a ratio of medians would hold the drift.
    """
    pairs = zip(over.tokens_per_s_by_turn, under.tokens_per_s_by_turn, strict=True)
    return median(first / second for first, second in pairs)


def figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _median(figures: Iterable[float]) -> float | None:
    values = list(figures)
    return median(values) if values else None
