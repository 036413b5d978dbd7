"""The tables of what is measured in the twin."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tests.bench.figures import figure
from tests.bench.paced.virtual.measures import Hidden, Lead, Timed


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


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in ("pair", "arm") else "right", no_wrap=True)
    return table
