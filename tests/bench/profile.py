"""Where a round's time goes: in process by function, served by process."""

import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import engine.drafting.model.draft_cache as drafting
import engine.drafting.model.token_drawer as drawing
import engine.verification.verifier as verifying
from engine.llm import LLM
from engine.requests.detokenizer import Detokenizer
from tests.bench.compare import conditions
from tests.bench.contestants.with_engine import generate, load
from tests.bench.contestants.with_serve import ServeMethod
from tests.bench.spans import Spans
from tests.bench.workload import Cell, Setting, Workload

SIZES = (1, 8)
TEMPERATURE = 0.7
OUTSIDE = "the loop around the engine"


def profile(workload: Workload, console: Console) -> None:
    in_process(workload, console)
    served(workload, console)
    console.print(conditions(workload), style="dim")


def in_process(workload: Workload, console: Console) -> None:
    """Print what each part of the engine costs per round."""
    torch.set_num_threads(workload.num_threads)
    with Spans() as spans:
        _wrap_modules(spans)
        llm = load(workload, Setting(workload.num_speculative_tokens, "fixed", "off"))
        _wrap_objects(spans, llm)
        columns = [_seconds_per_round(spans, llm, workload, size) for size in SIZES]
    _show(columns, f"A round in one process, k = {workload.num_speculative_tokens}, T = {TEMPERATURE}", console)


def _seconds_per_round(spans: Spans, llm: LLM, workload: Workload, size: int) -> dict[str, float]:
    prompts = workload.batches(Cell(size, TEMPERATURE))[0]
    generate(llm.engine, prompts, TEMPERATURE, workload.num_tokens)
    spans.seconds.clear()
    num_rounds = llm.stats.num_rounds_by_length.total()
    started = time.perf_counter()
    generate(llm.engine, prompts, TEMPERATURE, workload.num_tokens)
    elapsed = time.perf_counter() - started
    num_rounds = llm.stats.num_rounds_by_length.total() - num_rounds
    spans.seconds[OUTSIDE] = elapsed - sum(spans.seconds.values())
    return {name: seconds / num_rounds for name, seconds in spans.seconds.items()}


def served(workload: Workload, console: Console) -> None:
    """Print what each process takes per round, by the Router's metrics."""
    method = ServeMethod(workload, Setting(workload.num_speculative_tokens, "fixed", "auto"))
    columns = []
    try:
        for size in SIZES:
            cell = Cell(size, TEMPERATURE)
            prompts = workload.batches(cell)[0]
            method.run(prompts, cell)
            batch = method.run(prompts, cell)
            split = batch.split
            assert split is not None
            named = {
                "draft worker: computing": split.draft_s,
                "target worker: computing": split.target_s,
                "Router: waiting for workers beyond that": split.wire_s,
                "Router: delivery": split.delivery_s,
            }
            named["Router: scheduling, commit, text"] = split.round_s - sum(named.values())
            named["HTTP, streaming, client"] = batch.elapsed_s / split.num_rounds - split.round_s
            columns.append(named)
    finally:
        method.close()
    title = f"A round of the served application, k = {workload.num_speculative_tokens}, T = {TEMPERATURE}"
    _show(columns, title, console)


def _wrap_modules(spans: Spans) -> None:
    """Time the functions that the models' owners call; before loading, since some are bound then."""
    spans.wrap(drafting, "build", "draft: build inputs")
    spans.wrap(drawing, "next_tokens", "draft: build inputs")
    for name in ("plan_draws", "shape", "draw", "noised"):
        spans.wrap(drawing, name, "draft: sampling and noise")
    spans.wrap(verifying, "build", "verify: build inputs")
    spans.wrap(verifying, "plan_draws", "verify: sampling, noise, rule")
    spans.wrap(Detokenizer, "append", "detokenizing")


def _wrap_objects(spans: Spans, llm: LLM) -> None:
    engine: Any = llm.engine  # whose drafter and verifier run models here, not just the protocols
    spans.wrap(engine, "step", "engine: rest of the step")
    spans.wrap(engine.scheduler, "next_batch", "scheduling")
    spans.wrap(engine.scheduler, "commit", "commit")
    spans.wrap(engine.drafter, "propose", "draft: rest")
    spans.wrap(engine.drafter.drafter.cache.backend, "run", "draft: forward passes")
    spans.wrap(engine.verifier.backend, "run", "verify: forward pass")
    spans.wrap(engine.verifier, "_decide", "verify: sampling, noise, rule")
    spans.wrap(engine.verifier, "verify", "verify: rest")


def _show(columns: list[dict[str, float]], title: str, console: Console) -> None:
    table = Table(title=title)
    table.add_column("part")
    for size in SIZES:
        table.add_column(f"batch {size}, ms", justify="right")
        table.add_column("share", justify="right")
    totals = [sum(column.values()) for column in columns]
    names = sorted({name for column in columns for name in column}, key=lambda name: -columns[0].get(name, 0.0))
    for name in names:
        cells = []
        for column, total in zip(columns, totals, strict=True):
            seconds = column.get(name, 0.0)
            cells += [f"{seconds * 1e3:.3f}", f"{seconds / total:.1%}"]
        table.add_row(name, *cells)
    table.add_section()
    table.add_row("the round", *(text for total in totals for text in (f"{total * 1e3:.3f}", "100%")))
    console.print(table)
