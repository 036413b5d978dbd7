"""Cells of the comparison of methods, and the table of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from engine.verification.rule import RULES

ADAPTIVE = " adaptive"
"""Behind a method's name: `speculation=adaptive` chooses its draft lengths; else they are fixed."""
UNUSED = ", never used"
"""Behind `head`: a head is loaded, and nothing is drafted."""
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class MethodCell:
    """One method in one cell.

    Attributes:
        num_tokens: draft tokens, or nodes, of a round at most.
        mean_acceptance_length: tokens of a request per pass, passes without a draft included.
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


def table_of(cells: Sequence[MethodCell]) -> Table:
    """Return a row for each method, with its speed-up, its tokens per pass and its speed by domain."""
    table = Table(title="Speed-up over plain decoding; tokens per pass; tokens/s", title_justify="left")
    domains = list(dict.fromkeys(cell.domain for cell in cells))
    for name in ("batch", "T", "method", "rule", "k", *domains, "exact"):
        table.add_column(name, justify="left" if name in ("method", "rule") else "right")
    rows: dict[tuple[int, float, str, str, int], dict[str, MethodCell]] = {}
    for cell in cells:
        key = cell.batch_size, cell.temperature, cell.method, cell.verification, cell.num_tokens
        rows.setdefault(key, {})[cell.domain] = cell
    for (size, heat, *names), row in sorted(rows.items(), key=lambda item: item[0][:2]):
        figures = [_figures(row[name]) if name in row else "" for name in domains]
        table.add_row(str(size), f"{heat:g}", *map(str, names), *figures, _exactness(row.values()))
    return table


def _figures(cell: MethodCell) -> str:
    return f"{cell.speedup:.2f}; {cell.mean_acceptance_length:.2f}; {cell.tokens_per_s:4.0f}"


def _exactness(cells: Iterable[MethodCell]) -> str:
    """Return whether all texts are plain decoding's; `law` where no more than its distribution is promised."""
    row = list(cells)
    if all(cell.exact for cell in row):
        return "yes"
    return "no" if RULES[row[0].verification].shares_noise or not row[0].temperature else "law"
