"""Cells of the comparison of methods, and the tables and the picture that are made of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from engine.verification.rule import RULES
from tests.load.picture import COLOURS, INK, STYLE, save

PEER = "best of transformers"
ADAPTIVE = " adaptive"
"""Behind a method's name: `speculation=adaptive` chooses its draft lengths; else they are fixed."""
UNUSED = ", never used"
"""Behind `head`: a head is loaded, and nothing is drafted."""
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class MethodCell:
    """One method in one cell.

    Attributes:
        verification: empty for a peer, which has rules of its own.
        num_tokens: draft tokens, or nodes, of a round at most.
        mean_acceptance_length: tokens of a request per pass, passes without a draft included; 0 where nobody says.
        speedup: tokens/s over those of plain decoding in the same turn, the median of the turns.
        exact: whether every text was plain decoding's.
        large: whether the target is the large one.
    """

    method: str
    verification: str
    num_tokens: int
    temperature: float
    batch_size: int
    domain: str
    mean_acceptance_length: float
    tokens_per_s: float
    speedup: float
    exact: bool
    large: bool

    @property
    def setting(self) -> tuple[int, float]:
        return self.batch_size, self.temperature

    @property
    def is_peer(self) -> bool:
        """Whether another library computed it."""
        return not self.verification


def read(paths: Sequence[Path]) -> list[MethodCell]:
    return [MethodCell(**fields) for path in paths for fields in json.loads(path.read_text())]


Key = tuple[int, float, str, str, int]


def every_row(cells: Sequence[MethodCell]) -> Table:
    """Return a row for each method, with its speed-up, its tokens per pass and its speed by domain."""
    table, domains = _table("Speed-up over plain decoding; tokens per pass; tokens/s", cells, "method", "rule", "k")
    table.add_column("exact")
    groups: dict[Key, dict[str, MethodCell]] = {}
    for cell in cells:
        key = *cell.setting, cell.method, cell.verification, cell.num_tokens
        groups.setdefault(key, {})[cell.domain] = cell
    for (size, heat, *names), row in sorted(groups.items(), key=lambda item: item[0][:2]):
        figures = [_figures(row[name]) if name in row else "" for name in domains]
        table.add_row(str(size), f"{heat:g}", *map(str, names), *figures, _exactness(row.values()))
    return table


def best(cells: Sequence[MethodCell]) -> Table:
    """Return the fastest method of each cell, its speed-up, and its speed over the fastest peer's."""
    table, domains = _table("The fastest method: speed-up over plain decoding; over the fastest peer", cells)
    for (size, heat), by_domain in _by_setting(cells).items():
        figures = []
        for domain in domains:
            own = [cell for cell in by_domain.get(domain, []) if not cell.is_peer and cell.method != PLAIN]
            peers = [cell.tokens_per_s for cell in by_domain.get(domain, []) if cell.is_peer]
            if not own:
                figures.append("")
                continue
            top = max(own, key=lambda cell: cell.speedup)
            over = f"; {top.tokens_per_s / max(peers):.2f}" if peers else ""
            figures.append(f"{top.speedup:.2f}{over} {top.method} {top.verification} {top.num_tokens}")
        table.add_row(str(size), f"{heat:g}", *figures)
    return table


def adaptive(cells: Sequence[MethodCell]) -> Table:
    """Return what choosing draft lengths makes of the best fixed one, of the same method and of plain decoding."""
    table, domains = _table("Draft lengths chosen by goodput / the best fixed one, 0 included", cells, "method", "rule")
    for (size, heat), by_domain in _by_setting(cells).items():
        every = [cell for row in by_domain.values() for cell in row]
        chosen = [(cell.method, cell.verification) for cell in every if cell.method.endswith(ADAPTIVE)]
        for name, rule in dict.fromkeys(chosen):
            fixed = (name.removesuffix(ADAPTIVE), PLAIN)
            figures = []
            for domain in domains:
                row = [cell for cell in by_domain.get(domain, []) if cell.verification == rule or cell.method == PLAIN]
                own = [cell.speedup for cell in row if cell.method == name]
                others = {cell.num_tokens: cell.speedup for cell in row if cell.method in fixed}
                length = max(others, key=lambda k: others[k]) if others else 0
                figures.append(f"{own[0] / others[length]:.2f} (k={length})" if own and others else "")
            table.add_row(str(size), f"{heat:g}", fixed[0], rule, *figures)
    return table


def _table(title: str, cells: Sequence[MethodCell], *columns: str) -> tuple[Table, list[str]]:
    """Return a table with columns for batch and temperature, those named and the domains; and the domains."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    domains = list(dict.fromkeys(cell.domain for cell in cells))
    for name in ("batch", "T", *columns, *domains):
        table.add_column(name, justify="left" if name in ("method", "rule") else "right")
    return table, domains


def _by_setting(cells: Sequence[MethodCell]) -> dict[tuple[int, float], dict[str, list[MethodCell]]]:
    settings: dict[tuple[int, float], dict[str, list[MethodCell]]] = {}
    for cell in cells:
        settings.setdefault(cell.setting, {}).setdefault(cell.domain, []).append(cell)
    return dict(sorted(settings.items()))


def _figures(cell: MethodCell) -> str:
    length = f"{cell.mean_acceptance_length:.2f}" if cell.mean_acceptance_length else "-"
    return f"{cell.speedup:.2f}; {length}; {cell.tokens_per_s:4.0f}"


def _exactness(cells: Iterable[MethodCell]) -> str:
    """Return whether all texts are plain decoding's; `law` where no more than its distribution is promised."""
    row = list(cells)
    if all(cell.exact for cell in row):
        return "yes"
    shares_noise = any(not cell.is_peer and RULES[cell.verification].shares_noise for cell in row)
    return "no" if shares_noise or not row[0].temperature else "law"


@rc_context(STYLE)
def draw(cells: Sequence[MethodCell], png: Path) -> None:
    """Draw a panel for each batch size and temperature, with the best length and rule of each method."""
    sizes, heats = (sorted(set(values)) for values in zip(*(cell.setting for cell in cells), strict=True))
    names = list(dict.fromkeys(cell.method for cell in cells if cell.method != PLAIN and not cell.is_peer))
    figure = Figure(figsize=(3.4 * len(heats) + 1.4, 2.2 * len(sizes) + 0.5), layout="constrained")
    panels = figure.subplots(len(sizes), len(heats), squeeze=False, sharey="row")
    for size, row in zip(sizes, panels, strict=True):
        for heat, axes in zip(heats, row, strict=True):
            _panel(axes, [cell for cell in cells if cell.setting == (size, heat)], names)
            axes.set_title(f"batch {size}, T = {heat:g}")
        row[0].set_ylabel("speed-up over plain decoding")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    save(figure, png)


def _panel(axes: Axes, cells: Sequence[MethodCell], names: Sequence[str]) -> None:
    domains = list(dict.fromkeys(cell.domain for cell in cells))
    bars = [*((name, COLOURS[nth % len(COLOURS)]) for nth, name in enumerate(names)), (PEER, INK)]
    width = 0.85 / len(bars)
    for nth, (name, colour) in enumerate(bars):
        heights = []
        for domain in domains:
            speedups = [
                cell.speedup
                for cell in cells
                if cell.domain == domain and (cell.is_peer if name == PEER else cell.method == name)
            ]
            heights.append(max(speedups, default=0.0))
        places = [place + (nth - (len(bars) - 1) / 2) * width for place in range(len(domains))]
        axes.bar(places, heights, width, color=colour, label=name)
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(domains)), domains)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
