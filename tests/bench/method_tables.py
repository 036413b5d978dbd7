"""The tables of the comparison of methods: all rows, and what they say about the choice of a method."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from engine.verification.rule import RULES
from tests.bench.method_cells import ADAPTIVE, PLAIN, MethodCell

Key = tuple[int, float, str, str, int]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How long a method's requests of a cell waited for their first token, the median."""

    method: str
    batch_size: int
    temperature: float
    domain: str
    seconds: float


def all_tables(cells: Sequence[MethodCell]) -> Iterator[Table]:
    """Yield the tables that are made of cells; some may have no rows."""
    yield every_row(cells)
    yield best(cells)
    yield adaptive(cells)
    yield with_copies(cells)


def every_row(cells: Sequence[MethodCell]) -> Table:
    """Return a row for each method, with its speed-up, its tokens per pass and its speed by domain."""
    table, domains = _table("Speed-up over plain decoding; tokens per pass; tokens/s", cells, "method", "rule", "k")
    table.add_column("exact")
    groups: dict[Key, dict[str, MethodCell]] = {}
    for cell in cells:
        key = *cell.setting, cell.method, cell.verification, cell.num_tokens
        groups.setdefault(key, {})[cell.domain] = cell
    for (size, heat, *names), row in sorted(groups.items(), key=lambda item: item[0][:2]):
        figures = [_in(row, name, lambda cell: f"{_figures(cell)} {cell.tokens_per_s:4.0f}") for name in domains]
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


def with_copies(cells: Sequence[MethodCell]) -> Table:
    """Return what copies add to the model's drafts of the same length and rule, and the speed-up with them."""
    table, domains = _table("model+suffix / model; model+suffix / plain decoding", cells, "rule", "k")
    keys = dict.fromkeys(
        (*cell.setting, cell.verification, cell.num_tokens) for cell in cells if cell.method == "model+suffix"
    )
    for size, heat, rule, length in keys:
        figures = []
        for domain in domains:
            row = {
                cell.method: cell.speedup
                for cell in cells
                if (*cell.setting, cell.verification, cell.num_tokens) == (size, heat, rule, length)
                and cell.domain == domain
            }
            combined, model = row.get("model+suffix"), row.get("model")
            figures.append(f"{combined / model:.2f}; {combined:.2f}" if combined and model else "")
        table.add_row(str(size), f"{heat:g}", rule, str(length), *figures)
    return table


def costs(first_tokens: Sequence[FirstToken], target_bytes: int, draft_bytes: int) -> Table:
    """Return what a draft costs a user: memory, and the time to the first token."""
    table, domains = _table("Milliseconds to the first token", first_tokens, "method")
    table.caption = f"weights: target {target_bytes / 1e6:.0f} MB, draft model {draft_bytes / 1e6:.1f} MB"
    for size, heat, name in dict.fromkeys((one.batch_size, one.temperature, one.method) for one in first_tokens):
        figures = []
        for domain in domains:
            seconds = [
                one.seconds
                for one in first_tokens
                if (one.batch_size, one.temperature, one.method, one.domain) == (size, heat, name, domain)
            ]
            figures.append(f"{1e3 * median(seconds):.0f}" if seconds else "")
        table.add_row(str(size), f"{heat:g}", name, *figures)
    return table


def _table(
    title: str, of_domains: Sequence[MethodCell] | Sequence[FirstToken], *columns: str
) -> tuple[Table, list[str]]:
    """Return a table with columns for batch and temperature, those named and the domains; and the domains."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    domains = list(dict.fromkeys(one.domain for one in of_domains))
    for name in ("batch", "T", *columns, *domains):
        table.add_column(name, justify="left" if name in ("method", "rule") else "right")
    return table, domains


def _by_setting(cells: Sequence[MethodCell]) -> dict[tuple[int, float], dict[str, list[MethodCell]]]:
    """Return the cells by batch size and temperature, and by domain."""
    settings: dict[tuple[int, float], dict[str, list[MethodCell]]] = {}
    for cell in cells:
        settings.setdefault(cell.setting, {}).setdefault(cell.domain, []).append(cell)
    return dict(sorted(settings.items()))


def _in(row: dict[str, MethodCell], domain: str, text: Callable[[MethodCell], str]) -> str:
    return text(row[domain]) if domain in row else ""


def _figures(cell: MethodCell) -> str:
    length = f"{cell.mean_acceptance_length:.2f}" if cell.mean_acceptance_length else "-"
    return f"{cell.speedup:.2f}; {length};"


def _exactness(cells: Iterable[MethodCell]) -> str:
    """Return whether all texts are plain decoding's; `law` where no more than its distribution is promised."""
    row = list(cells)
    if all(cell.exact for cell in row):
        return "yes"
    shares_noise = any(not cell.is_peer and RULES[cell.verification].shares_noise for cell in row)
    return "no" if shares_noise or not row[0].temperature else "law"
