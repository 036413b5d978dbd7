"""The bench runs from end to end on models that cost nothing."""

import json
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console

from tests.bench import compare, turns
from tests.bench.contestants import with_serve
from tests.bench.figures import Row
from tests.bench.worker import Worker
from tests.bench.workload import Workload

IN_PROCESS = ("transformers", "transformers-assisted", "engine-plain", "engine-speculative")


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def check(rows: list[Row]) -> None:
    assert all(row.tokens_per_s > 0 and row.ttft_ms > 0 for row in rows)
    for row in rows:
        is_speculative = row.name in ("transformers-assisted", "engine-speculative", "serve-speculative")
        assert (row.mean_acceptance_length is not None) == is_speculative
        assert row.tpot_ms > 0 or not row.name.startswith("engine")
        assert row.acceptance_rate is None or 0 <= row.acceptance_rate <= 1
        assert (row.round_overhead_ms is not None) == (not row.name.startswith("transformers"))


def test_every_method_in_this_process_fills_its_rows(workload: Workload, console: Console, tmp_path: Path) -> None:
    rows, failures = turns.collect(IN_PROCESS, workload, console, Worker)
    assert failures == []
    pairs = [(row.name, row.batch_size) for row in rows]
    assert pairs == [(name, 1) for name in IN_PROCESS] + [(name, 2) for name in IN_PROCESS if "assisted" not in name]
    for row in rows:
        assert len(row.tokens_per_s_by_turn) == len(workload.batches(row.cell))
        assert row.tokens_per_s == median(row.tokens_per_s_by_turn)
    check(rows)
    compare.show(rows, workload, console)
    assert "engine-speculative / engine-plain" in printed(console)
    compare.write(rows, tmp_path / "rows.json")
    written: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    assert [Row(**row) for row in written] == rows


@pytest.mark.long
@pytest.mark.e2e
def test_the_served_application_fills_its_rows(
    workload: Workload, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_serve, "FIRST_SETTLE_S", 0.0)
    rows, failures = turns.collect(("serve-speculative",), workload, console, Worker)
    assert failures == []
    assert [row.batch_size for row in rows] == [1, 2]
    check(rows)
