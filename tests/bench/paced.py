"""The paced comparison: plain decoding, speculation and running ahead, in process and served, at the pace of GPUs.

The bundled pair computes; each pass then takes as long as a roofline says that the pair's models would take on their
devices (`engine.execution.paced`). So the CPU is free while a model works, as it is with a GPU, and one sees what the
rest of the system takes. With more than a few streams the bundled pair computes for longer than such a pass takes, so a
pair of small random models takes its place there.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from engine.execution.paced.device import PREFIX, VARIABLE
from tests.bench.compiled_models import compile_models
from tests.bench.light_pair import make_light_pair
from tests.bench.paced_cells import PacedCell, Pair, paced_cells, write
from tests.bench.paced_tables import show
from tests.bench.paced_virtual import virtual_ratios
from tests.bench.timeline import timeline
from tests.bench.turns import Start, collect
from tests.bench.worker import WorkerProcess
from tests.bench.workload import Cell, Workload, read_prompts

PAIR = "h100x4-70b+h100-1b"
STREAMS = (1, 8, 64)
TEMPERATURES = (0.0, 0.7, 1.0)
PACED_TOKENS = 256
MAX_STREAMS = 4
"""Streams up to which the bundled pair fits into the passes of an 8B target on one core."""
ARMS = ("plain", "speculative", "run-ahead")

ENVIRONMENT = {
    VARIABLE: "1",
    # As served workers have it: who waits for a pass must not take the CPU from the others.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
}


def methods_of(arms: Sequence[str]) -> list[str]:
    """Return the names of arms in both places; only where there are workers, one of them can run ahead."""
    engine = [f"engine-{arm}" for arm in arms if not arm.endswith("run-ahead")]
    return [*engine, *(f"serve-{arm}" for arm in arms)]


def paced(
    workload: Workload,
    pair_name: str,
    console: Console,
    *,
    streams: Sequence[int] = STREAMS,
    temperatures: Sequence[float] = TEMPERATURES,
    arms: Sequence[str] = ARMS,
    json: Path | None = None,
    png: Path | None = None,
    start: Start = WorkerProcess,
) -> list[str]:
    """Measure, print and write; returns what went wrong.

    Raises:
        ConfigError: there is no such pair.
    """
    os.environ |= ENVIRONMENT  # for the processes to be started, too
    pair = Pair.of(pair_name)
    workload = replace(
        workload, device=PREFIX + pair_name, cells=[Cell(size, heat) for size in streams for heat in temperatures]
    )
    cells: list[PacedCell] = []
    failures: list[str] = []
    with TemporaryDirectory(prefix="paceline-pair-") as folder:
        for paced_workload in _by_models(workload, Path(folder)):
            compile_models(paced_workload, console)
            rows, failed = collect(methods_of(arms), paced_workload, console, start)
            ratios = virtual_ratios(rows, pair, paced_workload, console)
            cells += paced_cells(rows, ratios, pair, paced_workload)
            failures += failed
    show(cells, workload, console)
    if json is not None:
        write(cells, json)
    if png is not None:
        timeline(workload, png, console)
    return failures


def _by_models(workload: Workload, folder: Path) -> Iterator[Workload]:
    """Yield the cells that the workload's own models can be paced in, and those that need lighter ones."""
    few = [cell for cell in workload.cells if cell.batch_size <= MAX_STREAMS]
    many = [cell for cell in workload.cells if cell.batch_size > MAX_STREAMS]
    if few:
        yield replace(workload, cells=few)
    if many:
        target, draft = map(str, make_light_pair(folder))
        yield replace(workload, target=target, draft=draft, prompts=read_prompts(target), cells=many)
