"""Every drafting method with every verification rule, by domain: what is accepted, how fast, and if the text is right.

All methods share one loaded target and one draft, in this process, and take the prompts of a cell in turn. Each method
has an engine of its own in each cell, which keeps no keys, values or outputs from one turn to the next. In the domain
`repeat` each prompt was answered before with one token of it changed, and methods that copy may copy that answer. An
engine that chooses draft lengths itself learns from `WARM_UP_ROUNDS` rounds before its first turn, as a server has
before most of its requests. `exact` compares with the token ids of plain decoding; the rule `rejection` and its kin
keep the distribution at T > 0, but not the text for a seed.
"""

import itertools
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.config import ModelConfig
from engine.models.registry import open_model
from tests.bench.compare import compile_models, conditions
from tests.bench.methods.domains import REPEAT, changed, read_domains
from tests.bench.methods.large_target import DESCRIPTION, make_large_target
from tests.bench.methods.pairs import Contender, LoadedPair, Turn, contenders, copies_outputs, run
from tests.bench.workload import Cell, Workload

NUM_TURNS = 2
WARM_UP_ROUNDS = 80


@dataclass(frozen=True, slots=True)
class MethodCell:
    """One method in one cell.

    Attributes:
        mean_acceptance_length: tokens of a request per pass, passes without a draft included.
        speedup: tokens/s over those of plain decoding in the same turn, the median of the turns.
        exact: whether every text was plain decoding's.
    """

    contender: Contender
    cell: Cell
    domain: str
    mean_acceptance_length: float
    speedup: float
    exact: bool


def methods(options: Namespace, workload: Workload, console: Console) -> list[MethodCell]:
    torch.set_num_threads(workload.num_threads)
    domains = read_domains(open_model(ModelConfig(workload.target)).tokenizer)
    with TemporaryDirectory(prefix="paceline-large-") as folder:
        if options.large:
            target = make_large_target(Path(workload.target), Path(folder))
            workload = replace(workload, target=str(target))
            compile_models(workload, console)
        workload = replace(workload, prompts=[ids for prompts in domains.values() for ids in prompts])
        pair = LoadedPair(
            workload,
            max_num_seqs=max(options.batch_sizes),
            max_length=max(map(len, workload.prompts)) + workload.num_tokens + max(options.lengths),
        )
        cells: list[MethodCell] = []
        # Each temperature and batch size with all domains, so that a table's rows are whole.
        places = list(itertools.product(options.temperatures, options.batch_sizes, domains))
        for heat, size, domain in track(places, console=console, description="cells"):
            turns = _turns(domains[domain], size, workload.num_turns or NUM_TURNS)
            cells += _measure(pair, options, turns, Cell(size, heat), domain, workload.num_tokens)
    if options.large:
        console.print(DESCRIPTION, highlight=False)
    console.print(_table_of(cells))
    console.print(conditions(workload), highlight=False)
    return cells


def _measure(
    pair: LoadedPair,
    options: Namespace,
    turns: list[list[list[int]]],
    cell: Cell,
    domain: str,
    num_tokens: int,
) -> list[MethodCell]:
    """Let all rows take each turn's prompts one after the other, from another row on each time."""
    rows = list(contenders(options.methods, options.rules, options.lengths))
    engines = [pair.engine(row, remembers_outputs=domain == REPEAT) for row in rows]
    for row, engine in zip(rows, engines, strict=True):
        for prompts in itertools.cycle(turns):
            if not row.is_adaptive or engine.stats.num_rounds_by_length.total() >= WARM_UP_ROUNDS:
                break
            run(engine, prompts, cell.temperature, num_tokens)
    run(engines[0], turns[0], cell.temperature, 2)
    if domain == REPEAT:
        for engine, prompts in itertools.product(filter(copies_outputs, engines), turns):
            run(engine, prompts, cell.temperature, num_tokens)
        turns = [[changed(ids, nth) for ids in prompts] for nth, prompts in enumerate(turns)]
    results: list[list[Turn]] = [[] for _ in rows]
    for turn, prompts in enumerate(turns):
        first = turn * 3 % len(rows)
        for index in [*range(first, len(rows)), *range(first)]:
            results[index].append(run(engines[index], prompts, cell.temperature, num_tokens))
    plain = results[0]
    return [
        MethodCell(
            row,
            cell,
            domain,
            mean_acceptance_length=fmean(turn.tokens_per_pass for turn in result),
            speedup=median(base.seconds / turn.seconds for base, turn in zip(plain, result, strict=True)),
            exact=all(base.texts == turn.texts for base, turn in zip(plain, result, strict=True)),
        )
        for row, result in zip(rows, results, strict=True)
    ]


def _turns(prompts: list[list[int]], size: int, count: int) -> list[list[list[int]]]:
    endless = prompts * (1 + size * count // len(prompts))
    return [endless[turn * size : (turn + 1) * size] for turn in range(count)]


def _table_of(cells: Sequence[MethodCell]) -> Table:
    """Return a row for each method, with its speed-up and its tokens per pass by domain."""
    table = Table(title="Speed-up over plain decoding; tokens per pass", title_justify="left")
    domains = list(dict.fromkeys(cell.domain for cell in cells))
    for name in ("batch", "T", "method", "rule", "k", *domains, "exact"):
        table.add_column(name, justify="left" if name in ("method", "rule") else "right")
    rows: dict[tuple[Cell, Contender], dict[str, MethodCell]] = {}
    for cell in cells:
        rows.setdefault((cell.cell, cell.contender), {})[cell.domain] = cell
    for (place, contender), row in sorted(rows.items(), key=lambda item: item[0][0].batch_size):
        names = contender.name, contender.verification, str(contender.num_tokens)
        figures = [f"{row[name].speedup:.2f}; {row[name].mean_acceptance_length:.2f}" for name in domains]
        is_exact = all(cell.exact for cell in row.values())
        table.add_row(str(place.batch_size), f"{place.temperature:g}", *names, *figures, "yes" if is_exact else "no")
    return table
