"""Every drafting method with every verification rule, by domain: what is accepted, how fast, and if the text is right.

All methods share one loaded target and one draft, in this process, and take the prompts of a cell in turn. Each method
has an engine of its own in each cell, which keeps no keys, values or outputs from one turn to the next. In the domain
`repeat` each prompt was answered before with one token of it changed, and methods that copy may copy that answer. An
engine that chooses draft lengths itself learns from `WARM_UP_ROUNDS` rounds before its first turn, as a server has
before most of its requests. `exact` compares with the token ids of plain decoding; the rule `rejection` and its kin
keep the distribution at T > 0, but not the text for a seed.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import track

from engine.config import Dtype, ModelConfig
from engine.models.tokenizer import load_tokenizer
from tests.bench import method_tables
from tests.bench.compare import conditions
from tests.bench.compiled_models import compile_models
from tests.bench.domains import REPEAT, changed, read_domains
from tests.bench.large_target import DESCRIPTION, make_large_target
from tests.bench.method_cells import MethodCell, read, write
from tests.bench.method_picture import draw
from tests.bench.method_tables import FirstToken
from tests.bench.method_turns import Contender, LoadedPair, Turn, contenders, copies_outputs, run
from tests.bench.with_lookup import Continued, TransformersLookup
from tests.bench.workload import Cell, Workload

NUM_TURNS = 2
WARM_UP_ROUNDS = 80


@dataclass(frozen=True, slots=True)
class Selection:
    """What is measured.

    Attributes:
        adaptive: the methods that also choose their draft lengths themselves.
        domains: all, if empty.
        minutes: no cell is begun that is unlikely to end before.
        large: the large target takes the place of the workload's.
        self_draft_layers: layers that a target which drafts for itself takes.
        peer_dtype: the number format in which transformers computes.
    """

    methods: Sequence[str]
    rules: Sequence[str]
    lengths: Sequence[int]
    adaptive: Sequence[str]
    temperatures: Sequence[float]
    batch_sizes: Sequence[int]
    domains: Sequence[str] = ()
    minutes: float = 30.0
    large: bool = False
    self_draft_layers: int = 4
    peer_dtype: Dtype = "auto"


def methods(
    workload: Workload, selection: Selection, console: Console, *, json: Path | None = None, png: Path | None = None
) -> list[MethodCell]:
    """Measure, print, write and draw."""
    torch.set_num_threads(workload.num_threads)
    domains = read_domains(load_tokenizer(ModelConfig(workload.target)))
    domains = {name: domains[name] for name in domains if name in (selection.domains or domains)}
    with TemporaryDirectory(prefix="paceline-large-") as folder:
        if selection.large:
            workload = replace(workload, target=str(make_large_target(Path(workload.target), Path(folder))))
            compile_models(workload, console)
        workload = replace(workload, prompts=[ids for prompts in domains.values() for ids in prompts])
        pair = LoadedPair(
            workload,
            max_num_seqs=max(selection.batch_sizes),
            max_length=max(map(len, workload.prompts)) + workload.num_tokens + max(selection.lengths),
        )
        measurement = _Measurement(workload, selection, pair)
        for heat, size, domain in track(list(measurement.order(domains)), console=console, description="cells"):
            measurement.measure(Cell(size, heat), domain, domains[domain])
    if selection.large:
        console.print(DESCRIPTION, highlight=False)
    show(measurement.cells, console)
    console.print(method_tables.costs(measurement.first_tokens, *pair.weight_bytes))
    console.print(f"transformers computes in {selection.peer_dtype}", highlight=False)
    console.print(conditions(workload), highlight=False)
    if measurement.left_out:
        console.print(f"no time for {', '.join(measurement.left_out)}: --minutes {selection.minutes:g}", style="red")
    if json is not None:
        write(measurement.cells, json)
    if png is not None:
        draw(measurement.cells, png)
    return measurement.cells


def show_parts(sources: Sequence[Path], console: Console, *, json: Path | None, png: Path | None) -> None:
    """Print and draw what earlier runs have measured in parts, and write their cells to one file."""
    cells = read(sources)
    show(cells, console)
    if json is not None:
        write(cells, json)
    if png is not None:
        draw(cells, png)


def show(cells: Sequence[MethodCell], console: Console) -> None:
    """Print all tables that are made of cells."""
    for table in method_tables.all_tables(cells):
        if table.row_count:
            console.print(table)


class _Measurement:
    """Measures cells one after the other, and keeps what came of them."""

    def __init__(self, workload: Workload, selection: Selection, pair: LoadedPair) -> None:
        self.cells: list[MethodCell] = []
        self.first_tokens: list[FirstToken] = []
        self.left_out: list[str] = []
        self._workload = workload
        self._selection = selection
        self._pair = pair
        self._lookup = TransformersLookup(replace(workload, dtype=selection.peer_dtype))
        self._started = time.monotonic()
        self._longest_s: dict[int, float] = {}

    def order(self, domains: dict[str, list[list[int]]]) -> Iterator[tuple[float, int, str]]:
        """Yield all cells: each temperature and batch size with all domains, so that a table's rows are whole."""
        yield from itertools.product(self._selection.temperatures, self._selection.batch_sizes, domains)

    def measure(self, cell: Cell, domain: str, prompts: list[list[int]]) -> None:
        """Measure a cell, if there is time left for it."""
        begun = time.monotonic()
        expected_s = self._longest_s.get(cell.batch_size, 0.0)
        if begun - self._started + expected_s > 60 * self._selection.minutes:
            self.left_out.append(f"{domain} at batch {cell.batch_size}, T={cell.temperature:g}")
            return
        turns = _turns(prompts, cell.batch_size, self._workload.num_turns or NUM_TURNS)
        self.cells += self._measure(turns, cell, domain)
        self._longest_s[cell.batch_size] = max(expected_s, time.monotonic() - begun)

    def _measure(self, turns: Sequence[list[list[int]]], cell: Cell, domain: str) -> list[MethodCell]:
        """Let all rows take each turn's prompts one after the other, from another row on each time."""
        selection, num_tokens = self._selection, self._workload.num_tokens
        rows = list(
            contenders(
                selection.methods, selection.rules, selection.lengths, selection.adaptive, selection.self_draft_layers
            )
        )
        engines = [self._pair.engine(row, remembers_outputs=domain == REPEAT) for row in rows]
        for row, engine in zip(rows, engines, strict=True):
            for prompts in itertools.cycle(turns):
                if not row.is_adaptive or engine.stats.num_rounds >= WARM_UP_ROUNDS:
                    break
                run(engine, prompts, cell.temperature, num_tokens)
        run(engines[0], turns[0], cell.temperature, 2)
        if domain == REPEAT:
            for engine, prompts in itertools.product(filter(copies_outputs, engines), turns):
                run(engine, prompts, cell.temperature, num_tokens)
            turns = [[changed(ids, nth) for ids in prompts] for nth, prompts in enumerate(turns)]
        results: list[list[Turn]] = [[] for _ in rows]
        peers: dict[str, list[Continued]] = {}
        for turn, prompts in enumerate(turns):
            first = turn * 3 % len(rows)
            for index in [*range(first, len(rows)), *range(first)]:
                results[index].append(run(engines[index], prompts, cell.temperature, num_tokens))
            for name, continued in self._lookup.run(prompts, cell.temperature).items():
                peers.setdefault(name, []).append(continued)
        self.first_tokens += _first_tokens(rows, results, cell, domain)
        cells = [self._cell(row, own, results[0], cell, domain) for row, own in zip(rows, results, strict=True)]
        for name, own in peers.items():
            cells.append(self._cell(Contender(name, "", 0), own, results[0], cell, domain))
        return cells

    def _cell(
        self, row: Contender, own: Sequence[Turn | Continued], plain: Sequence[Turn], cell: Cell, domain: str
    ) -> MethodCell:
        num_tokens = cell.batch_size * self._workload.num_tokens
        return MethodCell(
            row.name,
            row.verification,
            row.num_tokens,
            cell.temperature,
            cell.batch_size,
            domain,
            fmean(turn.tokens_per_pass for turn in own),
            median(num_tokens / turn.seconds for turn in own),
            median(base.seconds / turn.seconds for base, turn in zip(plain, own, strict=True)),
            all(base.texts == turn.texts for base, turn in zip(plain, own, strict=True)),
            self._selection.large,
        )


def _turns(prompts: list[list[int]], size: int, count: int) -> list[list[list[int]]]:
    """Return the prompts of each turn."""
    endless = prompts * (1 + size * count // len(prompts))
    return [endless[turn * size : (turn + 1) * size] for turn in range(count)]


def _first_tokens(
    rows: Sequence[Contender], results: Sequence[Sequence[Turn]], cell: Cell, domain: str
) -> Iterator[FirstToken]:
    """Yield the median time to the first token of plain decoding and of each method, whatever its rule and length."""
    for name in dict.fromkeys(row.method for row in rows):
        turns = [turn for row, own in zip(rows, results, strict=True) if row.method == name for turn in own]
        seconds = median(first for turn in turns for first in turn.first_s)
        yield FirstToken(name, cell.batch_size, cell.temperature, domain, seconds)
