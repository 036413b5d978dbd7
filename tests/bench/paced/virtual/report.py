"""The tables of what is measured in the twin."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.bench.paced.virtual.learning import Learning
from tests.bench.paced.virtual.measures import Hidden, Lead, Timed


def show_hidden(measured: Iterable[Hidden], console: Console) -> None:
    rows = (
        (
            *(*_named(hidden.timed), hidden.timed.arm, *_speed(hidden.timed)),
            *(f"{hidden.gain:.3f}", f"{hidden.bound:.3f}", f"{hidden.share_of_bound:.0%}"),
        )
        for hidden in measured
    )
    columns = ("pair", "rows", "arm", "tokens/s", "per GPU", "over in turn", "bound", "share")
    _show("what hides the draft", columns, rows, console)


def show_leads(title: str, leads: Iterable[Lead], console: Console) -> None:
    rows = (
        (lead.pair, str(lead.rows), lead.best, f"{lead.mean:.3f}", " ".join(f"{ratio:.3f}" for ratio in lead.ratios))
        for lead in leads
    )
    _show(title, ("pair", "rows", "best other", "ratio", "each seed"), rows, console)


def show_pools(measured: Iterable[tuple[Timed, Timed, Timed]], console: Console) -> None:
    rows = (
        (
            *(*_named(pooled), str(pooled.num_groups), *_speed(pooled)),
            *(f"{pooled.tokens_per_s / own.tokens_per_s:.3f}", f"{pooled.per_gpu / beside.per_gpu:.3f}", beside.arm),
        )
        for pooled, own, beside in measured
    )
    columns = ("pair", "rows", "groups", "tokens/s", "per GPU")
    columns += ("over own drafts", "over drafts beside, per GPU", "beside")
    _show("one draft GPU for several groups", columns, rows, console)


def show_learning(measured: Iterable[Learning], console: Console) -> None:
    rows = (
        (
            *(*_named(arm.timed), arm.name, *_speed(arm.timed), f"{arm.gain:.3f}", f"{arm.drafts:.0%}"),
            *(f"{arm.learns:.1%}", f"{arm.learned_per_s:.0f}"),
        )
        for arm in measured
    )
    columns = ("pair", "rows", "arm", "tokens/s", "per GPU", "over frozen", "drafts", "learns", "tokens a s of it")
    _show("a draft GPU that learns", columns, rows, console)


def _named(timed: Timed) -> tuple[str, str]:
    return timed.pair, str(timed.rows)


def _speed(timed: Timed) -> tuple[str, str]:
    return f"{timed.tokens_per_s:.0f}", f"{timed.per_gpu:.1f}"


def _show(title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]], console: Console) -> None:
    table = Table(title=f"VIRTUAL TIME, not a GPU: {title}")
    for name in columns:
        table.add_column(name, justify="left" if name in ("pair", "arm") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
