"""The tables of the paced comparison, and what they warn of."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tests.bench.figures import Row
from tests.bench.paced_cells import PacedCell, Pair, paced_cells
from tests.bench.paced_tables import show, warnings
from tests.bench.workload import Workload


@pytest.fixture
def cells(workload: Workload) -> list[PacedCell]:
    figures = {"round_overhead_ms": 2.0, "draft_ms": 4.0, "target_ms": 14.6, "wire_ms": 1.0, "delivery_ms": 0.25}
    rows = [
        Row(name, 8, 0.7, 4, 100.0, 5.0, 2.0, None, None, rows_per_round=8.0, tokens_per_s_by_turn=[rate], **figures)
        for name, rate in (("engine-speculative", 200.0), ("serve-speculative", 100.0), ("serve-run-ahead", 115.0))
    ]
    rows[-1] = replace(rows[-1], hit_rate=0.875, hit_rounds=0.5, hit_wait_ms=0.3, cpu_us={"Router": 123.0})
    return list(paced_cells(rows, {}, Pair.of("h100x4-70b+h100-1b"), workload))


def test_all_tables_are_printed(cells: list[PacedCell], workload: Workload, console: Console) -> None:
    show(cells, replace(workload, device="paced:h100x4-70b+h100-1b"), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    for expected in ("PACED, not a GPU", "0.500", "0.75", "1.15", "0.88", "123", "roofline", "tests.bench"):
        assert expected in text


def test_doubtful_figures_are_named(cells: list[PacedCell]) -> None:
    assert list(warnings(cells)) == []
    for ratio, is_told in ((1.04, False), (0.96, False), (1.06, True), (0.94, True)):
        told = list(warnings([replace(cells[1], virtual_ratio=ratio)]))
        assert bool(told) is is_told
    assert "serve speculative, 8 streams, T = 0.7: virtual time makes 0.94" in told[0]
    (late,) = warnings([replace(cells[1], target_ms=20.0)])
    assert "a target pass took 20.00 ms" in late
    assert list(warnings([replace(cells[1], target_ms=20.0, target_roof_ms=None)])) == []
