"""The tables of the paced comparison."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from tests.bench.compare import conditions
from tests.bench.paced_cells import PacedCell
from tests.bench.processes import NAMES
from tests.bench.workload import Workload

MAX_DISAGREEMENT = 0.05
"""Of virtual time and measurement; if they differ by more, one of them is wrong."""

LATE = 1.1
"""A target pass that takes so many times its roofline was not only paced."""

Column = tuple[str, Callable[[PacedCell], float | None], str]

RATES: tuple[Column, ...] = (
    ("tokens/s", lambda cell: cell.tokens_per_s, ".1f"),
    ("virtual", lambda cell: cell.virtual_ratio, ".2f"),
    ("of engine", lambda cell: cell.over_engine, ".3f"),
    ("TTFT", lambda cell: cell.ttft_ms, ".1f"),
    ("last TTFT", lambda cell: cell.ttft_last_ms, ".1f"),
    ("length", lambda cell: cell.mean_acceptance_length, ".2f"),
    ("rows", lambda cell: cell.rows_per_round, ".1f"),
)
ROUND: tuple[Column, ...] = (
    ("target", lambda cell: cell.target_ms, ".2f"),
    ("draft", lambda cell: cell.draft_ms, ".2f"),
    ("wire", lambda cell: cell.wire_ms, ".2f"),
    ("scheduling", lambda cell: cell.scheduling_ms, ".2f"),
    ("delivery", lambda cell: cell.delivery_ms, ".2f"),
    ("round", lambda cell: cell.round_ms, ".2f"),
    ("roofline", lambda cell: cell.roof_ms, ".2f"),
    ("added", lambda cell: cell.added_ms, ".2f"),
)
AHEAD: tuple[Column, ...] = (
    ("gain", lambda cell: cell.gain, ".2f"),
    ("bound", lambda cell: cell.bound, ".2f"),
    ("share", lambda cell: cell.share_of_bound, ".0%"),
    ("hit rate", lambda cell: cell.hit_rate, ".2f"),
    ("rounds of hits", lambda cell: cell.hit_rounds, ".2f"),
    ("hit ms", lambda cell: cell.hit_wait_ms, ".2f"),
    ("miss ms", lambda cell: cell.miss_wait_ms, ".2f"),
)


def show(cells: Sequence[PacedCell], workload: Workload, console: Console) -> None:
    """Print all tables."""
    title = f"PACED, not a GPU: {workload.device}"
    table = _table(title, cells, RATES)
    table.caption = (
        f"virtual: tokens/s in virtual time over those measured; of engine: over the same method in process\n"
        f"{conditions(workload)}"
    )
    table.caption_justify = "left"
    console.print(table)
    console.print(_table("A round without prompts, ms; added: beyond the passes that it waits for", cells, ROUND))
    if ahead := [cell for cell in cells if cell.gain is not None]:
        console.print(_table("Running ahead over speculation; waiting for drafts, ms", ahead, AHEAD))
    if busy := [cell for cell in cells if cell.cpu_us]:
        columns = [_cpu(name) for name in (*NAMES, "client")]
        console.print(_table("CPU time per token, in microseconds", busy, columns))
    for warning in warnings(cells):
        console.print(warning, style="yellow", markup=False)


def warnings(cells: Sequence[PacedCell]) -> Iterator[str]:
    """Yield what makes figures doubtful."""
    for cell in cells:
        label = f"{cell.place} {cell.name}, {cell.streams} streams, T = {cell.temperature:g}"
        if cell.virtual_ratio is not None and abs(cell.virtual_ratio - 1) > MAX_DISAGREEMENT:
            yield f"{label}: virtual time makes {cell.virtual_ratio:.2f} of the tokens/s that were measured"
        if (
            cell.target_ms is not None
            and cell.target_roof_ms is not None
            and cell.target_ms > LATE * cell.target_roof_ms
        ):
            yield (
                f"{label}: a target pass took {cell.target_ms:.2f} ms, {cell.target_roof_ms:.2f} by the roofline; "
                "other work took the CPU, or the real compute does not fit"
            )


def _cpu(name: str) -> Column:
    return name, lambda cell: cell.cpu_us.get(name), ".0f"


def _table(title: str, cells: Sequence[PacedCell], columns: Iterable[Column]) -> Table:
    table = Table(title=title)
    for name in ("streams", "T", "", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    columns = list(columns)
    for name, _, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for cell in cells:
        if last not in (None, (cell.streams, cell.temperature)):
            table.add_section()
        last = cell.streams, cell.temperature
        texts = (_text(read(cell), form) for _, read, form in columns)
        table.add_row(str(cell.streams), f"{cell.temperature:g}", cell.place, cell.name, *texts)
    return table


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
