"""Prefill: how fast prompts are read, and how long one waits for its first token while a full batch is continued."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from tests.bench.compare import conditions
from tests.bench.figures import Row
from tests.bench.turns import collect
from tests.bench.worker import PEERS_PYTHON
from tests.bench.workload import Cell, Workload

LENGTHS = (128, 512, 1500)
FULL_BATCH = 32
NUM_TOKENS = 16  # the others of a full batch must still be there when the late prompt has its first token
METHODS = ("transformers", "engine-plain", "engine-speculative")
PEERS = ("vllm-plain",)


def prefill(workload: Workload, console: Console) -> tuple[list[Row], list[str]]:
    """Measure and print both. Returns the rows, and what went wrong."""
    cells = [Cell(1, 0.0, length) for length in LENGTHS]
    cells += [Cell(FULL_BATCH, 0.0, length, is_last_late=True) for length in LENGTHS]
    workload = replace(workload, cells=cells, num_tokens=NUM_TOKENS)
    rows, failures = collect(METHODS + PEERS if PEERS_PYTHON.exists() else METHODS, workload, console)
    console.print(_table("Prompt tokens per second, one prompt", rows, is_late=False))
    console.print(_table(f"ms to the first token, as the last of {FULL_BATCH} that are continued", rows, is_late=True))
    console.print(conditions(workload), style="dim")
    return rows, failures


def _table(title: str, rows: Sequence[Row], *, is_late: bool) -> Table:
    table = Table(title=title)
    table.add_column("method")
    for length in LENGTHS:
        table.add_column(f"{length} tokens", justify="right")
    found = {(row.name, row.num_prompt_tokens): row for row in rows if row.is_last_late == is_late}
    for name in dict.fromkeys(name for name, _ in found):
        values = [found[name, length] for length in LENGTHS if (name, length) in found]
        table.add_row(name, *(_figure(row) for row in values))
    return table


def _figure(row: Row) -> str:
    assert row.num_prompt_tokens is not None
    return f"{row.ttft_ms:.1f}" if row.is_last_late else f"{row.num_prompt_tokens / row.ttft_ms * 1e3:.0f}"
