"""Cells of the paced comparison, and the tables that are made of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tests.bench.figures import Row, figure, paired_ratio
from tests.bench.paced.roofline import Pair
from tests.bench.workload import Arm, Workload

LATE = 1.1
"""A target pass that takes so many times its roofline was not only paced."""


@dataclass(frozen=True, slots=True)
class PacedCell:
    """One method in one cell; None where a figure does not apply.

    Attributes:
        target_roof_ms: a target pass by the roofline.
        added_ms: what a round takes beyond the passes that it waits for; with a prepared draft, for the target only.
        gain: tokens/s of running ahead over those of speculation.
        share_of_bound: of what running ahead would gain if drafting took no time.
        over_engine: tokens/s over those of the same method in process.
        tokens_per_s_per_gpu: over the GPUs of the target, and of the draft, if there is one.
    """

    row: Row
    target_roof_ms: float | None
    added_ms: float | None
    gain: float | None
    share_of_bound: float | None
    over_engine: float | None
    tokens_per_s_per_gpu: float


def paced_cells(rows: Sequence[Row], pair: Pair, workload: Workload) -> Iterator[PacedCell]:
    named = {(row.name, row.cell): row for row in rows}
    # The mean context of a row while it is decoded.
    context = sum(map(len, workload.prompts)) / len(workload.prompts) + workload.num_tokens / 2
    for row in rows:
        place, arm = row.name.split("-", 1)
        gain = share_of_bound = target_ms = added_ms = over_engine = None
        setting = Arm.of(arm, workload.num_speculative_tokens)
        k, num_rows = setting.k, row.rows_per_round
        if num_rows is not None and row.round_ms is not None and setting.speculation != "adaptive":
            late = 1.0 if row.hit_share is None else 1 - row.hit_share
            target_ms = 1e3 * pair.target_s(num_rows, k, context)
            added_ms = row.round_ms - target_ms - 1e3 * late * pair.draft_s(num_rows, k, context)
        speculative = named.get(("serve-speculative", row.cell))
        if row.name == "serve-run-ahead" and speculative is not None:
            gain = paired_ratio(row, speculative)
            share_of_bound = (gain - 1) / (pair.bound(num_rows or 1, k, context) - 1)
        if place == "serve" and (alone := named.get((f"engine-{arm}", row.cell))) is not None:
            over_engine = paired_ratio(row, alone)
        num_gpus = pair.target.num_gpus + (pair.draft.num_gpus if setting.speculation != "off" else 0)
        yield PacedCell(row, target_ms, added_ms, gain, share_of_bound, over_engine, row.tokens_per_s / num_gpus)


COLUMNS: tuple[tuple[str, Callable[[PacedCell], float | None], str], ...] = (
    ("tokens/s", lambda cell: cell.row.tokens_per_s, ".1f"),
    ("per GPU", lambda cell: cell.tokens_per_s_per_gpu, ".1f"),
    ("of engine", lambda cell: cell.over_engine, ".3f"),
    ("added ms", lambda cell: cell.added_ms, ".2f"),
    ("prepared", lambda cell: cell.row.hit_share, ".2f"),
    ("of k = 4", lambda cell: cell.gain, ".2f"),
    ("share of bound", lambda cell: cell.share_of_bound, ".0%"),
)


def show(cells: Sequence[PacedCell], pair: str, console: Console) -> None:
    caption = "added: what a round takes beyond the passes that it waits for; prepared: rounds whose drafts all were"
    table = Table("streams", "T", "", title=f"PACED, not a GPU: {pair}", caption=caption, caption_justify="left")
    for name, _, _ in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        texts = (figure(read(cell), form) for _, read, form in COLUMNS)
        table.add_row(str(cell.row.batch_size), f"{cell.row.temperature:g}", cell.row.name, *texts)
    console.print(table)
    for warning in warnings(cells):
        console.print(warning, style="yellow", markup=False)


def warnings(cells: Sequence[PacedCell]) -> Iterator[str]:
    """Yield what makes figures doubtful."""
    for cell in cells:
        row, roof_ms = cell.row, cell.target_roof_ms
        if row.target_ms is not None and roof_ms is not None and row.target_ms > LATE * roof_ms:
            took = f"a target pass took {row.target_ms:.2f} ms, {roof_ms:.2f} by the roofline"
            why = "other work took the CPU, or the real compute does not fit"
            yield f"{row.name}, {row.batch_size} streams, T = {row.temperature:g}: {took}; {why}"
