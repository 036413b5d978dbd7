"""Cells of the comparison of methods, and the table of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

ADAPTIVE = " adaptive"
"""Behind a method's name: `speculation=adaptive` chooses its draft lengths; else they are fixed."""
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class MethodCell:
    """One method in one cell.

    Attributes:
        num_tokens: draft tokens, or nodes, of a round at most.
        mean_acceptance_length: tokens of a request per pass, passes without a draft included.
        speedup: tokens/s over those of plain decoding in the same turn, the median of the turns.
        exact: whether every text was plain decoding's.
    """

    method: str
    verification: str
    num_tokens: int
    temperature: float
    batch_size: int
    domain: str
    mean_acceptance_length: float
    speedup: float
    exact: bool


def table_of(cells: Sequence[MethodCell]) -> Table:
    """Return a row for each method, with its speed-up and its tokens per pass by domain."""
    table = Table(title="Speed-up over plain decoding; tokens per pass", title_justify="left")
    domains = list(dict.fromkeys(cell.domain for cell in cells))
    for name in ("batch", "T", "method", "rule", "k", *domains, "exact"):
        table.add_column(name, justify="left" if name in ("method", "rule") else "right")
    rows: dict[tuple[int, float, str, str, int], dict[str, MethodCell]] = {}
    for cell in cells:
        key = cell.batch_size, cell.temperature, cell.method, cell.verification, cell.num_tokens
        rows.setdefault(key, {})[cell.domain] = cell
    for (size, heat, *names), row in sorted(rows.items(), key=lambda item: item[0][:2]):
        figures = [f"{row[name].speedup:.2f}; {row[name].mean_acceptance_length:.2f}" for name in domains]
        is_exact = all(cell.exact for cell in row.values())
        table.add_row(str(size), f"{heat:g}", *map(str, names), *figures, "yes" if is_exact else "no")
    return table
