"""All methods side by side: a table, the ratios that matter, and the conditions under which they were measured."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.models.loader import resolve_device, resolve_dtype
from tests.bench.figures import Row, figure, paired_ratio
from tests.bench.workload import Cell, Workload

CELLS = [Cell(batch_size, temperature) for batch_size in (1, 8) for temperature in (0.0, 0.7)]
RATIOS = (
    ("transformers-assisted", "transformers"),
    ("engine-plain", "transformers"),
    ("engine-plain", "vllm-plain"),
    ("engine-speculative", "vllm-plain"),
    ("engine-speculative", "vllm-speculative"),
    ("engine-speculative", "vllm-probabilistic"),
    ("over-vllm-plain", "vllm-plain"),
    ("over-vllm-speculative", "vllm-speculative"),
    ("over-vllm-speculative", "vllm-probabilistic"),
    ("over-vllm-speculative", "over-vllm-plain"),
    ("over-vllm-speculative", "engine-speculative"),
    ("engine-speculative", "engine-plain"),
    ("engine-speculative", "transformers"),
    ("serve-plain", "engine-plain"),
    ("serve-speculative", "engine-speculative"),
    ("serve-speculative", "serve-plain"),
)


COLUMNS = ("batch", "T", "method", "k", "tokens/s", "accepted", "length", "overhead ms")


def show(rows: Sequence[Row], workload: Workload, console: Console) -> None:
    table = Table(title="Tokens per second, side by side", caption=conditions(workload), caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for cell in dict.fromkeys(row.cell for row in rows):
        for row in (row for row in rows if row.cell == cell):
            table.add_row(
                str(row.batch_size),
                f"{row.temperature:g}",
                row.name,
                figure(row.num_speculative_tokens, "d"),
                f"{row.tokens_per_s:.1f}",
                figure(row.acceptance_rate, ".3f"),
                figure(row.mean_acceptance_length, ".2f"),
                figure(row.round_overhead_ms, ".2f"),
            )
        table.add_section()
    console.print(table)
    if (ratios := _ratios(rows)).row_count:
        console.print(ratios)


def write(rows: Iterable[Row], path: Path) -> None:
    entries = [{name: value for name, value in asdict(row).items() if name != "texts"} for row in rows]
    path.write_text(json.dumps(entries, indent=2) + "\n")


def conditions(workload: Workload) -> str:
    """Return the machine, versions, models and command of a measurement."""
    device = resolve_device(workload.device)
    dtype = str(resolve_dtype(workload.dtype, device)).removeprefix("torch.")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "ray"))
    return "\n".join(
        (
            f"{_processor()}, {workload.num_threads} threads in process, {device}, {dtype}; {versions}",
            f"target {workload.target}, draft {workload.draft}",
            f"{workload.num_tokens} tokens for each of {len(workload.prompts)} prompts of up to "
            f"{max(len(ids) for ids in workload.prompts)} tokens; medians over batches, which all methods took in turn",
            f"python -m tests.bench {shlex.join(sys.argv[1:])}",
        )
    )


def compile_models(workload: Workload, console: Console) -> None:
    """Compile both models' passes, where they run compiled and that was not done before."""
    if workload.compile == "auto" and resolve_device(workload.device).type == "cpu":
        with console.status("compiling, where that was not done before"):
            command = [sys.executable, "-m", "engine.execution.cpu", "--dtype", workload.dtype]
            heads = [] if workload.head is None else [[workload.target, "--head", workload.head]]
            for models in ([workload.target, workload.draft], *heads):
                subprocess.run([*command, *models], check=True, capture_output=True)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _ratios(rows: Sequence[Row]) -> Table:
    named = {(row.name, row.cell): row for row in rows}
    cells = list(dict.fromkeys(row.cell for row in rows))
    table = Table(title="Ratios of tokens per second", caption="medians of the turns' ratios", caption_justify="left")
    table.add_column("")
    for cell in cells:
        table.add_column(f"batch {cell.batch_size}, T={cell.temperature:g}", justify="right")
    for over, under in RATIOS:
        pairs = [(named.get((over, cell)), named.get((under, cell))) for cell in cells]
        if any(first and second for first, second in pairs):
            values = [f"{paired_ratio(first, second):.2f}" if first and second else "-" for first, second in pairs]
            table.add_row(f"{over} / {under}", *values)
    return table
