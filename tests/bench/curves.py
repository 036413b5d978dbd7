"""Curves over the number of rows or streams, with speculation and without: a table and a PNG."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from tests.bench.compare import collect, show
from tests.bench.figures import Row
from tests.bench.workload import Cell, Workload

SIZES = (1, 2, 4, 8, 16, 32)
CELLS = [Cell(size, 0.0) for size in SIZES]
COLOURS = {"adaptive": "#c2571a", "speculative": "#0b6e8a", "plain": "#8a8f98"}
LABELS = {"adaptive": "adaptive", "speculative": "fixed, k = 4", "plain": "off"}


def batch_curve(workload: Workload, png: Path, console: Console) -> list[str]:
    """Draw tokens/s over rows of the engine in one process."""
    workload = replace(workload, cells=CELLS)
    rows, failures = collect(("engine-plain", "engine-speculative", "engine-adaptive"), workload, console)
    show(rows, workload, console)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    _draw(axes, rows, "tokens_per_s")
    axes.set(title="One process: throughput by batch size", xlabel="rows in a batch", ylabel="tokens per second")
    figure.savefig(png, dpi=150)
    return failures


def load_curve(workload: Workload, png: Path, console: Console) -> list[str]:
    """Draw tokens/s and what one client sees over concurrent streams of the served application."""
    workload = replace(workload, cells=CELLS)
    rows, failures = collect(("serve-plain", "serve-speculative", "serve-adaptive"), workload, console)
    show(rows, workload, console)
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, name, label in (
        (left, "tokens_per_s", "tokens per second, all streams"),
        (middle, "tpot_ms", "time per token of one stream, ms (median)"),
        (right, "ttft_ms", "time to first token, ms (median)"),
    ):
        _draw(axes, rows, name)
        axes.set(xlabel="concurrent streams", ylabel=label)
    figure.suptitle("Served over HTTP: load")
    figure.savefig(png, dpi=150)
    return failures


def _draw(axes: Axes, rows: Sequence[Row], figure_name: str) -> None:
    for mode, colour in COLOURS.items():
        points = [(row.batch_size, getattr(row, figure_name)) for row in rows if row.name.endswith(mode)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=LABELS[mode])
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
