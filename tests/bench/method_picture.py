"""The picture of the comparison of methods: speed-up over plain decoding, by domain and method."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.method_cells import PLAIN, MethodCell
from tests.bench.pictures import INK, STYLE, save

COLOURS = ("#2f86c9", "#4aa36b", "#d9b52e", "#d9722e", "#9b5fc0", "#c94f6d", "#5bb5b0")
PEER = "best of transformers"


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
