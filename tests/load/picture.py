"""Pictures: the latencies and tokens of a run, or the curves of a sweep."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.pictures import INK, STYLE, save
from tests.load.records import LatencyName, Record
from tests.load.slo import Slo
from tests.load.sweep import Level

COLOURS = ("#2f86c9", "#d9722e", "#3f9c5a", "#8c5fb0", "#b8486a", INK)
_NUM_BINS = 60


@rc_context(STYLE)
def draw_run(records: Sequence[Record], slo: Slo | None, png: Path) -> None:
    """Draw the share of requests within each TTFT and TPOT, and tokens per second over time, by arm."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    arms = list(dict.fromkeys(record.arm for record in records))
    names: tuple[LatencyName, LatencyName] = ("ttft", "tpot")
    for axes, name, label in zip(
        (first, second), names, ("time to first token, ms", "time per token, ms"), strict=True
    ):
        for arm, colour in zip(arms, COLOURS, strict=False):
            values = sorted(
                1000 * value for record in records if record.arm == arm for value in _latencies_s(record, name)
            )
            if values:
                axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=colour, label=arm)
        _draw_limit(axes, slo, name, is_vertical=True)
        axes.set(xlabel=label, ylabel="share of requests", xlim=(0, None), ylim=(0, 1.02))
        axes.grid()
    for arm, colour in zip(arms, COLOURS, strict=False):
        _draw_throughput(third, [record for record in records if record.arm == arm], colour)
    third.set(xlabel="seconds of the arm's turns", ylabel="tokens per second", ylim=(0, None))
    third.grid()
    first.legend()
    save(figure, png)


@rc_context(STYLE)
def draw_sweep(levels: Sequence[Level], slo: Slo | None, label: str, png: Path) -> None:
    """Draw throughput, p50 and p99 of TTFT and of TPOT over the load, by arm; hollow points miss the SLO."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    for arm, colour in zip(dict.fromkeys(level.arm for level in levels), COLOURS, strict=False):
        members = [level for level in levels if level.arm == arm]
        loads = [level.load for level in members]
        first.plot(loads, [level.summary.tokens_per_s for level in members], color=colour, label=arm)
        for level in members:
            face = colour if level.holds else "none"
            first.plot(level.load, level.summary.tokens_per_s, "o", color=colour, markerfacecolor=face)
        names: tuple[LatencyName, LatencyName] = ("ttft", "tpot")
        for axes, name in zip((second, third), names, strict=True):
            found = [(level.load, level.summary.latencies_ms[name]) for level in members]
            for percentile, style in (("p50", "-"), ("p99", "--")):
                points = [(load, getattr(values, percentile)) for load, values in found if values is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=colour, label=f"{arm}, {percentile}")
    for axes, name, title in (
        (second, "ttft", "time to first token, ms"),
        (third, "tpot", "time per token, ms"),
    ):
        _draw_limit(axes, slo, name, is_vertical=False)
        axes.set(ylabel=title)
    first.set(ylabel="tokens per second")
    for axes in (first, second, third):
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads := sorted({level.load for level in levels}), [f"{load:g}" for load in loads])
        axes.set(xlabel=label, ylim=(0, None))
        axes.grid()
    first.legend()
    second.legend()
    save(figure, png)


def _latencies_s(record: Record, name: LatencyName) -> list[float]:
    return record.latencies_s(name) if record.is_ok else []


def _draw_limit(axes: Axes, slo: Slo | None, name: str, *, is_vertical: bool) -> None:
    for latency, limit_ms in slo.limits_ms if slo else ():
        if latency == name:
            draw = axes.axvline if is_vertical else axes.axhline
            draw(limit_ms, color=INK, linestyle=":")


def _draw_throughput(axes: Axes, records: Sequence[Record], colour: str) -> None:
    """Draw tokens per second over the time that an arm was measured; its turns follow one another."""
    times: list[float] = []
    counts: list[float] = []
    offset_s = 0.0
    for turn in sorted({record.turn for record in records}):
        members = [record for record in records if record.turn == turn]
        start_s = min(record.scheduled_s for record in members)
        for record in members:
            previous = 0
            for time_s, count in record.chunks:
                times.append(offset_s + time_s - start_s)
                counts.append(count - previous if count else record.num_tokens / len(record.chunks))
                previous = count
        offset_s += max(record.end_s for record in members) - start_s
    if times:
        sums, edges = np.histogram(times, bins=_NUM_BINS, range=(0, offset_s), weights=counts)
        axes.plot((edges[:-1] + edges[1:]) / 2, sums / np.diff(edges), color=colour)
