"""Pictures: the latencies and tokens of a run, or the curves of a sweep; legible on a white page and on a dark one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from .records import LatencyName, Record, Slo
from .sweep import Level

INK = "#818a94"  # between both pages' backgrounds
COLOURS = ("#2f86c9", "#d9722e", "#3f9c5a", "#8c5fb0", "#b8486a", "#d9b52e", "#5bb5b0", INK)
STYLE = {
    "font.size": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4,
}
"""What a picture is drawn with, by `matplotlib.rc_context`."""
LABELS: dict[LatencyName, str] = {"ttft": "time to first token, ms", "tpot": "time per token, ms"}


@rc_context(STYLE)
def draw_run(records: Sequence[Record], slo: Slo | None, png: Path) -> None:
    """Draw the share of requests within each TTFT and TPOT, by arm."""
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    distributions = figure.subplots(1, 2)
    for arm, colour in zip(dict.fromkeys(record.arm for record in records), COLOURS, strict=False):
        members = [record for record in records if record.arm == arm]
        for axes, name in zip(distributions, LABELS, strict=True):
            values = sorted(1000 * value for record in members if record.is_ok for value in record.latencies_s(name))
            shares = np.arange(1, len(values) + 1) / max(1, len(values))
            axes.step(values, shares, where="post", color=colour, label=arm)
    for axes, (name, label) in zip(distributions, LABELS.items(), strict=True):
        axes.set(xlabel=label, ylabel="share of requests", xlim=(0, None), ylim=(0, 1.02))
        axes.grid()
        if (limit_ms := _limit_ms(slo, name)) is not None and limit_ms < 2 * axes.get_xlim()[1]:
            axes.axvline(limit_ms, color=INK, linestyle=":")
    distributions[0].legend()
    save(figure, png)


@rc_context(STYLE)
def draw_sweep(levels: Sequence[Level], slo: Slo | None, label: str, png: Path) -> None:
    """Draw throughput, p50 and p99 of TTFT and of TPOT over the load, by arm; hollow points miss the SLO."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    throughput, *latencies = figure.subplots(1, 3)
    for arm, colour in zip(dict.fromkeys(level.arm for level in levels), COLOURS, strict=False):
        members = [level for level in levels if level.arm == arm]
        loads = [level.load for level in members]
        throughput.plot(loads, [level.summary.tokens_per_s for level in members], color=colour, label=arm)
        for level in members:
            face = colour if level.holds else "none"
            throughput.plot(level.load, level.summary.tokens_per_s, "o", color=colour, markerfacecolor=face)
        for axes, name in zip(latencies, LABELS, strict=True):
            found = [(level.load, level.summary.latencies_ms[name]) for level in members]
            for percentile, style in (("p50", "-"), ("p99", "--")):
                points = [(load, getattr(values, percentile)) for load, values in found if values is not None]
                x, y = zip(*points, strict=True) if points else ((), ())
                axes.plot(x, y, style, color=colour, label=f"{arm}, {percentile}")
    throughput.set(ylabel="tokens per second")
    for axes, (name, title) in zip(latencies, LABELS.items(), strict=True):
        axes.set(ylabel=title)
        if (limit_ms := _limit_ms(slo, name)) is not None:
            axes.axhline(limit_ms, color=INK, linestyle=":")
    ticks = _ticks(levels)
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{load:g}" for load in ticks])
        axes.minorticks_off()
        axes.set(xlabel=label, ylim=(0, None))
        axes.grid()
    throughput.legend()
    latencies[0].legend()
    save(figure, png)


def _limit_ms(slo: Slo | None, name: LatencyName) -> float | None:
    return dict(slo.limits_ms).get(name) if slo else None


def _ticks(levels: Sequence[Level]) -> list[float]:
    """Return loads that are far enough apart for their labels."""
    ticks: list[float] = []
    for load in sorted({level.load for level in levels}):
        if not ticks or load >= 1.5 * ticks[-1]:
            ticks.append(load)
    return ticks


def save(figure: Figure, png: Path) -> None:
    """Write a figure on a transparent ground, in a folder that is made if needed."""
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=160, transparent=True)
