"""Curves over the number of rows or streams, with speculation and without: a table and a PNG."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from tests.bench.compare import show
from tests.bench.figures import Row, paired_ratio
from tests.bench.pictures import STYLE, save
from tests.bench.turns import collect
from tests.bench.workload import Cell, Workload

SIZES = (1, 2, 4, 8, 16, 32)
CELLS = [Cell(size, 0.0) for size in SIZES]
COLOURS = {"adaptive": "#d9722e", "speculative": "#2f86c9", "plain": "#818a94"}
LABELS = {"adaptive": "adaptive", "speculative": "fixed, k = 4", "plain": "off"}


@rc_context(STYLE)
def batch_curve(workload: Workload, png: Path, console: Console) -> list[str]:
    """Draw what a batch of the engine in one process generates, and what its rows cost."""
    workload = replace(workload, cells=CELLS)
    rows, failures = collect(("engine-plain", "engine-speculative", "engine-adaptive"), workload, console)
    show(rows, workload, console)
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2),
        ("tokens_per_s", "tpot_ms"),
        ("tokens per second, all rows", "time per token of one row, ms"),
        strict=True,
    ):
        _draw(axes, rows, name)
        axes.set(xlabel="rows in a batch", ylabel=label)
    figure.axes[0].legend()
    save(figure, png)
    return failures


@rc_context(STYLE)
def load_curve(workload: Workload, png: Path, console: Console) -> list[str]:
    """Draw tokens/s and what one client sees over concurrent streams of the served application."""
    workload = replace(workload, cells=CELLS)
    rows, failures = collect(("serve-plain", "serve-speculative", "serve-adaptive"), workload, console)
    show(rows, workload, console)
    for line in _against_the_better(rows):
        console.print(line)
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 3),
        ("tokens_per_s", "tpot_ms", "ttft_ms"),
        ("tokens per second, all streams", "time per token of one stream, ms", "time to first token, ms"),
        strict=True,
    ):
        _draw(axes, rows, name)
        axes.set(xlabel="concurrent streams", ylabel=label)
    figure.axes[0].legend()
    save(figure, png)
    return failures


def _against_the_better(rows: Sequence[Row]) -> Iterator[str]:
    """Say of each point what adaptive makes of the better of the other two: the lower of its ratios to them."""
    found = {(row.name, row.cell): row for row in rows}
    for name, cell in found:
        others = [found.get((other, cell)) for other in ("serve-plain", "serve-speculative")]
        if name == "serve-adaptive" and (known := [row for row in others if row is not None]):
            better = min(known, key=lambda row: paired_ratio(found[name, cell], row))
            ratio = paired_ratio(found[name, cell], better)
            label = LABELS[better.name.removeprefix("serve-")]
            yield f"{cell.batch_size} streams: adaptive / better of off and fixed = {ratio:.2f} (better: {label})"


def _draw(axes: Axes, rows: Sequence[Row], figure_name: str) -> None:
    for mode, colour in COLOURS.items():
        points = [(row.batch_size, getattr(row, figure_name)) for row in rows if row.name.endswith(mode)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=LABELS[mode])
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.set_ylim(bottom=0)
    axes.grid()
