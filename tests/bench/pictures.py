"""How the bench's pictures look: legible on a white page and on a dark one, at the width of a README."""

from pathlib import Path

from matplotlib.figure import Figure

PICTURES = Path(__file__).parent / "plots"
INK = "#818a94"  # between both pages' backgrounds
STYLE = {
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4,
}
"""What a picture is drawn with, by `matplotlib.rc_context`."""


def save(figure: Figure, png: Path) -> None:
    """Write a figure on a transparent ground, in a folder that is made if needed."""
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=160, transparent=True)
