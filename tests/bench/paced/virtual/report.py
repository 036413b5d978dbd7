"""The tables and pictures of what is measured in the twin."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tests.bench.figures import figure
from tests.bench.paced.virtual.measures import Hidden, Lead, Timed
from tests.load.picture import COLOURS, INK, STYLE, save

LABELS = {
    "speculative": "in turn",
    "run-ahead": "runs ahead",
    "alternate": "alternating batches",
    "any": "chosen by goodput",
    "adaptive-any": "adaptive",
}
WANTED = 0.9
"""The share of a hidden draft's gain that is wanted."""


def show_hidden(found: Sequence[Hidden], console: Console) -> None:
    table = _table(
        "VIRTUAL TIME, not a GPU: what hides the draft",
        *("pair", "rows", "arm", "tokens/s", "per GPU", "round ms", "length", "hits", "target busy", "draft busy"),
        *("over in turn", "bound", "share", "no draft time"),
    )
    for one in found:
        timed = one.timed
        table.add_row(
            *(timed.pair, str(timed.rows), timed.arm, f"{timed.tokens_per_s:.0f}", f"{timed.per_gpu:.1f}"),
            *(f"{timed.round_ms:.2f}", f"{timed.length:.2f}", figure(timed.hit_rate, ".2f")),
            *(f"{timed.target_busy:.2f}", f"{timed.draft_busy:.2f}"),
            *(f"{one.gain:.3f}", f"{one.bound:.3f}", f"{one.share_of_bound:.0%}", f"{one.free_gain:.3f}"),
        )
    console.print(table)


def show_leads(title: str, leads: Iterable[Lead], console: Console) -> None:
    table = _table(f"VIRTUAL TIME, not a GPU: {title}", "pair", "rows", "T", "best other", "ratio", "95 %", "each seed")
    for one in leads:
        interval = f"{one.mean - one.half_width:.3f} to {one.mean + one.half_width:.3f}"
        each = " ".join(f"{ratio:.3f}" for ratio in one.ratios)
        table.add_row(one.pair, str(one.rows), one.temperature, one.best, f"{one.mean:.3f}", interval, each)
    console.print(table)


def show_pools(found: Iterable[tuple[Timed, Timed, Timed]], console: Console) -> None:
    table = _table(
        "VIRTUAL TIME, not a GPU: one draft GPU for several groups",
        *("pair", "rows", "groups", "GPUs", "tokens/s", "per GPU", "round ms", "hits", "draft busy"),
        *("over own drafts", "over drafts beside, per GPU", "beside"),
    )
    for pooled, own, beside in found:
        table.add_row(
            *(pooled.pair, str(pooled.rows), str(pooled.num_groups), str(pooled.num_gpus)),
            *(f"{pooled.tokens_per_s:.0f}", f"{pooled.per_gpu:.1f}", f"{pooled.round_ms:.2f}"),
            *(figure(pooled.hit_rate, ".2f"), f"{pooled.draft_busy:.2f}"),
            *(f"{pooled.tokens_per_s / own.tokens_per_s:.3f}", f"{pooled.per_gpu / beside.per_gpu:.3f}", beside.arm),
        )
    console.print(table)


@rc_context(STYLE)
def draw_hidden(found: Sequence[Hidden], png: Path) -> None:
    """Draw the share of a hidden draft's gain over the rows, a panel for each pair."""
    pairs = list(dict.fromkeys(one.timed.pair for one in found))
    picture = Figure(figsize=(3.2 * len(pairs) + 0.5, 2.8), layout="constrained")
    panels = picture.subplots(1, len(pairs), squeeze=False, sharey=True)[0]
    for axes, pair in zip(panels, pairs, strict=True):
        arms = [arm for arm in LABELS if arm != "speculative" and any(one.timed.arm == arm for one in found)]
        for arm, colour in zip(arms, COLOURS, strict=False):
            line = [one for one in found if (one.timed.pair, one.timed.arm) == (pair, arm)]
            shares = [max(-0.5, min(1.5, one.share_of_bound)) for one in line]
            axes.plot([one.timed.rows for one in line], shares, "o-", color=colour, label=LABELS[arm])
        axes.axhline(WANTED, color=INK, linestyle=":")
        axes.set(xscale="log", xlabel="rows", title=pair)
        ticks = sorted({one.timed.rows for one in found})
        axes.set_xticks(ticks, labels=map(str, ticks))
        axes.minorticks_off()
        axes.grid()
    panels[0].set_ylabel("share of the gain of a hidden draft")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(picture, png)


@rc_context(STYLE)
def draw_calibration(found: Sequence[Timed], png: Path) -> None:
    """Draw how many draft tokens were accepted over how many the planner expected, by bins of at least 20."""
    picture = Figure(figsize=(3.4, 3.0), layout="constrained")
    axes = picture.subplots()
    axes.plot([0, 1], [0, 1], ":", color=INK)
    for timed, colour in zip(found, COLOURS, strict=False):
        one = timed.reliability
        bins = [b for b in zip(one.predicted, one.accepted, one.counts, strict=True) if b[2] >= 20]
        expected, kept = ([b[i] / b[2] for b in bins] for i in (0, 1))
        label = f"T = {timed.temperature}: {sum(one.counts)} tokens, error {one.error:.3f}"
        axes.plot(expected, kept, "o-", color=colour, label=label)
    axes.set(xlabel="expected acceptance", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    axes.grid()
    axes.legend(fontsize="small")
    save(picture, png)


@rc_context(STYLE)
def draw_pools(found: Sequence[tuple[Timed, Timed, Timed]], png: Path) -> None:
    """Draw tokens per second per GPU over the groups of one draft GPU; below the dotted line it does not pay."""
    picture = Figure(figsize=(4.2, 2.8), layout="constrained")
    axes = picture.subplots()
    counts = [pooled.num_groups for pooled, _, _ in found]
    names = "one draft GPU for all", "a draft GPU each", "the draft beside the target"
    for index, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        style = ":" if index == 2 else "o-"
        axes.plot(counts, [places[index].per_gpu for places in found], style, color=colour, label=name)
    axes.set(xlabel="groups", ylabel="tokens per second per GPU", ylim=(0, None), title=found[0][0].pair)
    axes.set_xticks(counts)
    axes.grid()
    axes.legend()
    save(picture, png)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in ("pair", "arm") else "right", no_wrap=True)
    return table
