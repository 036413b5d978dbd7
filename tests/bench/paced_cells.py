"""Cells of the paced comparison: what was measured beside what the pair's own passes take."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.execution.paced.device import PREFIX, PacedDevice, parse_device, split_pair
from engine.execution.paced.roofline import decoding
from tests.bench.figures import Row, paired_ratio
from tests.bench.worker import Setting
from tests.bench.workload import Cell, Workload


@dataclass(frozen=True, slots=True)
class Pair:
    """The devices of a target and its draft, and the time of their passes by the roofline, in seconds."""

    name: str
    target: PacedDevice
    draft: PacedDevice

    @classmethod
    def of(cls, name: str) -> "Pair":
        """Return the pair of a name such as `h100x4-70b+h100-1b`.

        Raises:
            ConfigError: there is no such device.
        """
        target, draft = split_pair(PREFIX + name)
        return cls(name, parse_device(target), parse_device(draft))

    def target_s(self, num_rows: float, k: int, context: float) -> float:
        """Return the time of a pass over rows with `k` draft tokens each."""
        return self.target.pass_seconds(decoding(round(num_rows), k + 1, round(context)))

    def draft_s(self, num_rows: float, k: int, context: float) -> float:
        """Return the time of the `k` passes that make a draft for each row."""
        return k * self.draft.pass_seconds(decoding(round(num_rows), 1, round(context)))

    def bound(self, num_rows: float, k: int, context: float) -> float:
        """Return how much faster rounds are whose drafts take no time: `1 + k * t_draft / t_verify`."""
        return 1 + self.draft_s(num_rows, k, context) / self.target_s(num_rows, k, context)


@dataclass(frozen=True, slots=True)
class PacedCell:
    """One method in one cell; None where a figure does not apply. Times in ms; those of a round are means.

    Attributes:
        target_ms, draft_ms, wire_ms, scheduling_ms, delivery_ms: where a round goes; see `figures.RoundSplit`.
        target_roof_ms: a target pass by the roofline.
        roof_ms: the passes that a round waits for, by the roofline; of a draft that runs ahead, those after misses.
        added_ms: what a round takes beyond `roof_ms`.
        ttft_ms, ttft_last_ms: time to first token, of the median request and of the last one of a batch.
        hit_rate: share of drafts that were prepared when they were asked for.
        hit_rounds: share of rounds in which all were.
        hit_wait_ms, miss_wait_ms: what these rounds and the others waited for their drafts.
        share_of_bound: what running ahead gains over speculation, of what it would if drafting took no time.
        cpu_us: CPU time per token, by process.
        over_engine: tokens/s over those of the same method in process.
        virtual_ratio: tokens/s in virtual time over those measured.
    """

    place: str
    name: str
    pair: str
    streams: int
    temperature: float
    tokens_per_s: float
    target_ms: float | None
    draft_ms: float | None
    added_ms: float | None
    ttft_ms: float
    hit_rate: float | None
    share_of_bound: float | None
    gain: float | None
    bound: float | None
    round_ms: float | None
    wire_ms: float | None
    scheduling_ms: float | None
    delivery_ms: float | None
    target_roof_ms: float | None
    roof_ms: float | None
    ttft_last_ms: float
    hit_rounds: float | None
    hit_wait_ms: float | None
    miss_wait_ms: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    rows_per_round: float | None
    num_tokens: int
    cpu_us: dict[str, float]
    over_engine: float | None
    virtual_ratio: float | None


def context_of(workload: Workload) -> float:
    """Return the mean context of a row while it is decoded."""
    return sum(map(len, workload.prompts)) / len(workload.prompts) + workload.num_tokens / 2


def paced_cells(
    rows: Sequence[Row], ratios: Mapping[tuple[str, Cell], float], pair: Pair, workload: Workload
) -> Iterator[PacedCell]:
    """Yield a cell for each row.

    Args:
        ratios: of virtual time, by method and cell.
    """
    named = {(row.name, row.cell): row for row in rows}
    for row in rows:
        place, arm = row.name.split("-", 1)
        speculative = named.get(("serve-speculative", row.cell))
        gain = bound = None
        if row.name == "serve-run-ahead" and speculative is not None:
            gain = paired_ratio(row, speculative)
            bound = pair.bound(row.rows_per_round or 1, workload.num_speculative_tokens, context_of(workload))
        alone = named.get((f"engine-{arm}", row.cell))
        target_ms, draft_ms = roofline_ms(row, pair, workload)
        roof_ms = None if target_ms is None or draft_ms is None else target_ms + draft_ms
        round_ms = row.round_ms
        yield PacedCell(
            place=place,
            name=arm,
            pair=pair.name,
            streams=row.batch_size,
            temperature=row.temperature,
            tokens_per_s=row.tokens_per_s,
            target_ms=row.target_ms,
            draft_ms=row.draft_ms,
            added_ms=None if roof_ms is None or round_ms is None else round_ms - roof_ms,
            ttft_ms=row.ttft_ms,
            hit_rate=row.hit_rate,
            share_of_bound=None if gain is None or bound is None else (gain - 1) / (bound - 1),
            gain=gain,
            bound=bound,
            round_ms=round_ms,
            wire_ms=row.wire_ms,
            scheduling_ms=row.scheduling_ms,
            delivery_ms=row.delivery_ms,
            target_roof_ms=target_ms,
            roof_ms=roof_ms,
            ttft_last_ms=row.ttft_last_ms,
            hit_rounds=row.hit_rounds,
            hit_wait_ms=row.hit_wait_ms,
            miss_wait_ms=row.miss_wait_ms,
            acceptance_rate=row.acceptance_rate,
            mean_acceptance_length=row.mean_acceptance_length,
            rows_per_round=row.rows_per_round,
            num_tokens=workload.num_tokens,
            cpu_us=row.cpu_us,
            over_engine=paired_ratio(row, alone) if alone is not None and place == "serve" else None,
            virtual_ratio=ratios.get((row.name, row.cell)),
        )


def roofline_ms(row: Row, pair: Pair, workload: Workload) -> tuple[float | None, float | None]:
    """Return the passes that a mean round waits for, of the target and of the draft; None where their size varies."""
    setting = Setting.of(row.name.split("-", 1)[1], workload.num_speculative_tokens)
    num_rows, k, context = row.rows_per_round, setting.num_speculative_tokens, context_of(workload)
    if setting.speculation == "adaptive" or num_rows is None:
        return None, None
    late = 1.0 if row.hit_rounds is None else 1 - row.hit_rounds
    return 1e3 * pair.target_s(num_rows, k, context), 1e3 * late * pair.draft_s(num_rows, k, context)


def write(cells: Sequence[PacedCell], path: Path) -> None:
    """Write the cells as a JSON list."""
    path.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")
