"""The tables of the paced comparison."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tests.bench.compare import conditions
from tests.bench.paced_cells import PacedCell
from tests.bench.processes import NAMES
from tests.bench.workload import Workload

MAX_DISAGREEMENT = 0.05
"""Of virtual time and measurement; if they differ by more, one of them is wrong."""

Column = tuple[str, Callable[[PacedCell], float | None], str]

ROUND: tuple[Column, ...] = (
    ("tokens/s", lambda cell: cell.tokens_per_s, ".1f"),
    ("virtual", lambda cell: cell.virtual_ratio, ".2f"),
    ("round", lambda cell: cell.round_ms, ".2f"),
    ("target", lambda cell: cell.target_ms, ".2f"),
    ("draft", lambda cell: cell.draft_ms, ".2f"),
    ("wire", lambda cell: cell.wire_ms, ".2f"),
    ("sched.", lambda cell: cell.scheduling_ms, ".2f"),
    ("deliv.", lambda cell: cell.delivery_ms, ".2f"),
    ("added", lambda cell: cell.added_ms, ".2f"),
    ("TTFT", lambda cell: cell.ttft_ms, ".0f"),
    ("last", lambda cell: cell.ttft_last_ms, ".0f"),
    ("length", lambda cell: cell.mean_acceptance_length, ".2f"),
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
    title = f"PACED, not a GPU: {workload.device}; rounds without prompts and first tokens in ms"
    table = _table(title, cells, ROUND)
    table.caption, table.caption_justify = conditions(workload), "left"
    console.print(table)
    if ahead := [cell for cell in cells if cell.gain is not None]:
        console.print(_table("Running ahead over speculation; waiting for drafts", ahead, AHEAD))
    console.print(_served(cells))
    if busy := [cell for cell in cells if cell.cpu_us]:
        columns = [_cpu(name) for name in (*NAMES, "client")]
        console.print(_table("CPU time per token, in microseconds", busy, columns))
    for cell in cells:
        if cell.virtual_ratio is not None and abs(cell.virtual_ratio - 1) > MAX_DISAGREEMENT:
            console.print(
                f"{_label(cell)}: virtual time says {cell.virtual_ratio:.2f} of what was measured", style="yellow"
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


def _served(cells: Sequence[PacedCell]) -> Table:
    """Return what is left of tokens/s when the same method is served, and how much later its tokens come."""
    table = Table(title="Served, against in process")
    for name in ("streams", "T", "", "tokens/s", "first token, ms", "last of the batch, ms"):
        table.add_column(name, justify="right" if name else "left")
    named = {(cell.place, cell.name, cell.streams, cell.temperature): cell for cell in cells}
    for served in cells:
        alone = named.get(("engine", served.name, served.streams, served.temperature))
        if served.over_engine is not None and alone is not None:
            table.add_row(
                str(served.streams),
                f"{served.temperature:g}",
                served.name,
                f"{served.over_engine:.3f}",
                f"{served.ttft_ms - alone.ttft_ms:+.1f}",
                f"{served.ttft_last_ms - alone.ttft_last_ms:+.1f}",
            )
    return table


def _label(cell: PacedCell) -> str:
    return f"{cell.place} {cell.name}, {cell.streams} streams, T = {cell.temperature:g}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
