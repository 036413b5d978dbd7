"""The paced cells in virtual time: the same models, prompts and seeds, with a clock that only the passes move.

What is measured and what is computed must agree, or one of them is wrong. From the measurement comes only what a round
takes besides its passes: of plain decoding for itself, of speculation for itself and for running ahead.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from rich.console import Console

from engine.config import EngineConfig, ModelConfig
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch
from engine.execution.paced.backend import work_of
from engine.execution.paced.device import PacedDevice
from engine.execution.registry import load_backend
from engine.llm import run_in_process
from engine.sampling.params import SamplingParams
from tests.bench.figures import Row
from tests.bench.paced_cells import Pair, context_of
from tests.bench.virtual_time import Delays, Place, virtual_engine
from tests.bench.worker import Setting
from tests.bench.workload import Cell, Workload

MAX_TURNS = 4
"""Batches of a cell that virtual time repeats; a large one takes seconds."""
LARGE = 32


def virtual_ratios(
    rows: Sequence[Row], pair: Pair, workload: Workload, console: Console
) -> dict[tuple[str, Cell], float]:
    """Return tokens/s in virtual time over those measured, by method and cell.

    The ratio is the median over the first batches: the same prompts both times.
    """
    torch.set_num_threads(workload.num_threads)
    target, draft = (_load(path, workload) for path in (workload.target, workload.draft))
    named = {(row.name, row.cell): row for row in rows}
    ratios = {}
    for row in rows:
        measured = named.get((calibrating(row.name), row.cell))
        if measured is None or (delays := delays_of(measured, pair, workload)) is None:
            continue
        count = 1 if row.batch_size > LARGE else MAX_TURNS
        batches = list(workload.batches(row.cell))[:count]
        with console.status(f"in virtual time: {row.name}, {row.batch_size} streams, T = {row.temperature:g}"):
            rates = [run(row, prompts, (target, draft), pair, delays, workload) for prompts in batches]
        ratios[row.name, row.cell] = median(
            virtual / real for virtual, real in zip(rates, row.tokens_per_s_by_turn, strict=False)
        )
    return ratios


def calibrating(name: str) -> str:
    """Return the method whose measurement tells what a method's rounds take besides their passes."""
    place, arm = name.split("-", 1)
    base = arm.removesuffix("run-ahead").removesuffix("-")
    return f"{place}-speculative" if base in ("", "adaptive") else f"{place}-{base}"


def delays_of(row: Row, pair: Pair, workload: Workload) -> Delays | None:
    """Return what a measured row's rounds took besides their passes."""
    values = row.wire_ms, row.delivery_ms, row.scheduling_ms, row.target_ms, row.draft_ms, row.rows_per_round
    if any(value is None for value in values):
        return None
    wire_ms, delivery_ms, scheduling_ms, target_ms, draft_ms, num_rows = (value or 0.0 for value in values)
    k = Setting.of(row.name.split("-", 1)[1], workload.num_speculative_tokens).num_speculative_tokens
    context = context_of(workload)
    target_extra_ms = target_ms - 1e3 * pair.target_s(num_rows, k, context)
    draft_extra_ms = draft_ms - 1e3 * pair.draft_s(num_rows, k, context)
    return Delays(
        network_s=wire_ms / (4 if k else 2) / 1e3,
        draft_s=max(0.0, draft_extra_ms) / 1e3,
        round_s=(delivery_ms + scheduling_ms + max(0.0, target_extra_ms)) / 1e3,
    )


def run(
    row: Row,
    prompts: Sequence[Sequence[int]],
    models: tuple[Backend, Backend],
    pair: Pair,
    delays: Delays,
    workload: Workload,
) -> float:
    """Continue a batch of prompts in virtual time; returns tokens/s.

    Requests arrive as far apart as their first tokens do on average; what a batch takes outside of its rounds is added.
    """
    place, arm = row.name.split("-", 1)
    setting = Setting.of(arm, workload.num_speculative_tokens)
    where: Place = "ahead" if setting.run_ahead == "on" else "beside" if place == "engine" else "apart"
    longest = max(map(len, prompts)) + workload.num_tokens
    config = EngineConfig(
        num_speculative_tokens=setting.num_speculative_tokens,
        speculation=setting.speculation,
        max_num_seqs=workload.max_num_seqs,
        # Also for the branches of a draft that runs ahead.
        num_blocks=4 * len(prompts) * (longest // EngineConfig.block_size + 4),
        enable_prefix_caching=False,
    )
    target, draft = models
    virtual = virtual_engine(
        config,
        where,
        (target, pass_time(pair.target)),
        (draft, pass_time(pair.draft)) if setting.num_speculative_tokens else None,
        delays,
    )
    gap_s = 2e-3 * (row.ttft_last_ms - row.ttft_ms) / max(1, len(prompts) - 1)
    waiting = list(enumerate(prompts))
    while waiting or virtual.engine.has_work:
        while waiting and (not virtual.engine.has_work or waiting[0][0] * gap_s <= virtual.router.now):
            index, prompt = waiting.pop(0)
            params = SamplingParams(
                temperature=row.temperature, seed=index, max_tokens=workload.num_tokens, ignore_eos=True
            )
            virtual.engine.add(str(index), prompt, params)
        run_in_process(virtual.engine.step())
    return len(prompts) * workload.num_tokens / (virtual.router.now + (row.front_ms or 0.0) / 1e3)


def pass_time(device: PacedDevice) -> Callable[[ForwardBatch], float]:
    """Return the time of a device's passes."""
    return lambda batch: device.pass_seconds(work_of(batch))


def _load(path: str, workload: Workload) -> Backend:
    config = ModelConfig(path, dtype=workload.dtype, compile=workload.compile, num_threads=workload.num_threads)
    backend = load_backend(config)
    backend.warm_up(compile_missing=False)
    return backend
