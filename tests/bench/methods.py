"""Every drafting method with every verification rule, by domain: what is accepted, how fast, and if the text is right.

All methods share one loaded target and one draft, in this process, and take the prompts of a cell in turn. Each turn
has an engine of its own, so that no method profits from earlier outputs. `exact` compares with the token ids of plain
decoding; the rule `rejection` and its kin keep the distribution at T > 0, but not the text for a seed.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.config import EngineConfig, ModelConfig
from engine.drafting.registry import DraftModel, choose_method
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.backend import Backend
from engine.execution.registry import load_backend
from engine.llm import run_in_process
from engine.models.tokenizer import load_tokenizer
from engine.sampling.params import SamplingParams
from engine.stats import SpeculationStats
from engine.verification.verifier import ModelVerifier
from tests.bench.compiled_models import compile_models
from tests.bench.domains import read_domains
from tests.bench.large_target import make_large_target
from tests.bench.with_lookup import TransformersLookup
from tests.bench.workload import Cell, Workload

NUM_BLOCKS = 400
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class MethodCell:
    """One method in one cell.

    Attributes:
        num_tokens: draft tokens, or nodes, of a round at most.
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


@dataclass(frozen=True, slots=True)
class Contender:
    """A method with its rule and its draft length; the name `adaptive` stands for the default choice of lengths."""

    method: str
    verification: str
    num_tokens: int
    settings: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _Turn:
    seconds: float
    texts: list[list[int]]
    stats: SpeculationStats


def contenders(methods: Sequence[str], rules: Sequence[str], lengths: Sequence[int]) -> Iterator[Contender]:
    """Yield plain decoding, each pair that the engine takes at each length, and the adaptive choice."""
    yield Contender(PLAIN, "coupled", 0)
    for method in methods:
        for rule in rules:
            try:
                config = EngineConfig(drafting=method, verification=rule)  # type: ignore[arg-type]
                choose_method(config, has_draft_model=True)
            except ConfigError:
                continue
            for length in lengths:
                yield Contender(method, rule, length, {"speculation": "fixed"})
    yield Contender("adaptive", "coupled", max(lengths), {"drafting": "auto", "speculation": "adaptive"})


def methods(
    workload: Workload,
    console: Console,
    *,
    large: bool,
    names: Sequence[str],
    rules: Sequence[str],
    lengths: Sequence[int],
    temperatures: Sequence[float],
    batch_sizes: Sequence[int],
    json_path: Path | None = None,
    domain_names: Sequence[str] = (),
) -> list[MethodCell]:
    """Measure, print and write."""
    torch.set_num_threads(workload.num_threads)
    domains = read_domains(load_tokenizer(ModelConfig(workload.target)))
    with TemporaryDirectory(prefix="paceline-large-") as folder:
        if large:
            workload = replace(workload, target=str(make_large_target(Path(workload.target), Path(folder))))
            compile_models(workload, console)
        target, draft = (
            load_backend(ModelConfig(path, dtype=workload.dtype, device=workload.device, compile=workload.compile))
            for path in (workload.target, workload.draft)
        )
        for backend in (target, draft):
            backend.warm_up()
        lookup = TransformersLookup(workload)
        cells: list[MethodCell] = []
        settings = [Cell(size, heat) for size in batch_sizes for heat in temperatures]
        chosen = [name for name in domains if not domain_names or name in domain_names]
        for domain, cell in track([(d, c) for d in chosen for c in settings], console=console, description="cells"):
            turns = _turns(domains[domain], cell.batch_size, workload.num_turns or 2)
            rows = list(contenders(names, rules, lengths))
            cells += _measure(rows, target, draft, lookup, turns, cell, domain, workload, large=large)
    console.print(table(cells))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")
    return cells


def _turns(prompts: list[list[int]], size: int, count: int) -> list[list[list[int]]]:
    """Return the prompts of each turn."""
    endless = prompts * (1 + size * count // len(prompts))
    return [endless[turn * size : (turn + 1) * size] for turn in range(count)]


def _measure(
    rows: Sequence[Contender],
    target: Backend,
    draft: Backend,
    lookup: TransformersLookup,
    turns: Sequence[list[list[int]]],
    cell: Cell,
    domain: str,
    workload: Workload,
    *,
    large: bool,
) -> Iterator[MethodCell]:
    """Let the rows take each turn's prompts one after the other, from another row on each time."""
    results: dict[int, list[_Turn]] = {index: [] for index in range(len(rows))}
    others: dict[str, list[float]] = {}
    for turn, prompts in enumerate(turns):
        first = turn * 3 % len(rows)
        for index in [*range(first, len(rows)), *range(first)]:
            results[index].append(_run(rows[index], target, draft, prompts, cell, workload.num_tokens))
        if cell.batch_size == 1:
            for name, seconds in lookup.run(prompts[0], cell.temperature).items():
                others.setdefault(name, []).append(seconds)
    plain = results[0]
    num_tokens = cell.batch_size * workload.num_tokens
    for index, row in enumerate(rows):
        own = results[index]
        yield MethodCell(
            row.method,
            row.verification,
            row.num_tokens,
            cell.temperature,
            cell.batch_size,
            domain,
            fmean(turn.stats.mean_acceptance_length for turn in own),
            median(num_tokens / turn.seconds for turn in own),
            median(base.seconds / turn.seconds for base, turn in zip(plain, own, strict=True)),
            all(base.texts == turn.texts for base, turn in zip(plain, own, strict=True)),
            large,
        )
    for name, seconds in others.items():
        speeds = [num_tokens / value for value in seconds]
        ratios = [base.seconds / value for base, value in zip(plain, seconds, strict=True)]
        yield MethodCell(
            name, "", 0, cell.temperature, 1, domain, 0.0, median(speeds), median(ratios), exact=False, large=large
        )


def _run(
    row: Contender, target: Backend, draft: Backend, prompts: list[list[int]], cell: Cell, num_tokens: int
) -> _Turn:
    settings: dict[str, object] = {"drafting": row.method, "verification": row.verification} | row.settings
    config = EngineConfig(
        num_speculative_tokens=row.num_tokens,
        num_blocks=NUM_BLOCKS,
        enable_prefix_caching=False,
        **settings,  # type: ignore[arg-type]
    )
    method = choose_method(config, has_draft_model=True)
    drafter = method.make(config, DraftModel(draft, target.info.vocab_size) if method.loads_model else None)
    verifier = ModelVerifier(target, config)
    engine = Engine(
        config,
        drafter=method.drafter_of_engine(config, drafter),
        verifier=verifier,
        num_blocks=verifier.num_blocks,
        vocab_size=target.info.vocab_size,
        max_model_len=target.info.max_model_len,
        eos_token_ids=target.info.eos_token_ids,
    )
    texts: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    for index, ids in enumerate(prompts):
        params = SamplingParams(temperature=cell.temperature, seed=index, max_tokens=num_tokens, ignore_eos=True)
        engine.add(str(index), ids, params)
    while engine.has_work:
        for output in run_in_process(engine.step()):
            texts[int(output.request_id)] += output.token_ids
    return _Turn(time.perf_counter() - started, texts, replace(engine.stats))


def table(cells: Sequence[MethodCell]) -> Table:
    """Return a row for each method, with its speed-up and its accepted tokens per pass by domain."""
    result = Table(title="Speed-up over plain decoding; tokens per pass", title_justify="left")
    domains = list(dict.fromkeys(cell.domain for cell in cells))
    for name in ("batch", "T", "method", "rule", "k", *domains, "exact"):
        result.add_column(name, justify="left" if name in ("method", "rule") else "right")
    groups: dict[tuple[int, float, str, str, int], dict[str, MethodCell]] = {}
    for cell in cells:
        key = cell.batch_size, cell.temperature, cell.method, cell.verification, cell.num_tokens
        groups.setdefault(key, {})[cell.domain] = cell
    for (size, heat, *names), row in sorted(groups.items(), key=lambda item: item[0][:2]):
        figures = [f"{row[name].speedup:.2f}; {row[name].mean_acceptance_length:.2f}" for name in domains]
        exact = "yes" if all(cell.exact for cell in row.values()) else "-"
        result.add_row(str(size), f"{heat:g}", *map(str, names), *figures, exact)
    return result
