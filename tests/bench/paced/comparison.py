"""The paced comparison: plain decoding, speculation and running ahead, in process and served, at the pace of GPUs.

The bundled pair computes; each pass then takes as long as a roofline says that the pair's models would take on their
devices (`tests.bench.paced_device`). So the CPU is free while a model works, as it is with a GPU, and one sees what the
rest of the system takes. With more than a few streams the bundled pair computes for longer than such a pass takes, so a
pair of small random models takes its place there.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from rich.console import Console

from tests.bench.audit import audit
from tests.bench.compare import compile_models, conditions
from tests.bench.paced.light_pair import make_light_pair
from tests.bench.paced.roofline import Pair
from tests.bench.paced.tables import PacedCell, paced_cells, show
from tests.bench.paced_device import environment
from tests.bench.turns import collect
from tests.bench.workload import Workload, read_prompts

MAX_STREAMS = 4
"""Streams up to which the bundled pair fits into the passes of an 8B target on one core."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""As served workers have it: a process that waits for a pass must not take the CPU from the others."""


def paced(
    workload: Workload,
    pair_name: str,
    arms: Sequence[str],
    console: Console,
) -> list[str]:
    """Measure and print; returns what went wrong. Raises ConfigError if there is no such pair."""
    pair = Pair.of(pair_name)
    cells: list[PacedCell] = []
    failures: list[str] = []
    # Only where there are workers, one of them can run ahead.
    names = [f"engine-{arm}" for arm in arms if not arm.endswith("run-ahead")] + [f"serve-{arm}" for arm in arms]
    with TemporaryDirectory(prefix="paceline-pair-") as folder:
        for paced_workload in _by_models(workload, Path(folder)):
            compile_models(paced_workload, console)
            with patch.dict(os.environ, PASSIVE | environment(pair_name)):
                rows, failed = collect(names, paced_workload, console)
            cells += paced_cells(rows, pair, paced_workload)
            failures += failed + audit(rows, paced_workload, console)
    show(cells, pair_name, console)
    console.print(conditions(workload), highlight=False)
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
