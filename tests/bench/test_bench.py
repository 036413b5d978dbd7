"""The bench runs from end to end on models that cost nothing."""

import json
from dataclasses import replace
from io import StringIO
from itertools import pairwise, permutations
from statistics import median
from typing import Any

import pytest

from tests.bench import compare, turns
from tests.bench.audit import audit
from tests.bench.contestants import with_serve
from tests.bench.figures import Batch, Row
from tests.bench.worker import Worker, WorkerProcess
from tests.bench.workload import Cell, Workload
from tests.load.records import Acceptance

IN_PROCESS = ("transformers", "transformers-assisted", "engine-plain", "engine-speculative")


def check(rows: list[Row]) -> None:
    for row in rows:
        assert row.tokens_per_s > 0
        is_speculative = row.name in ("transformers-assisted", "engine-speculative", "serve-speculative")
        assert (row.mean_acceptance_length is not None) == is_speculative
        assert row.acceptance_rate is None or 0 <= row.acceptance_rate <= 1
        assert (row.round_overhead_ms is not None) == (not row.name.startswith("transformers"))


def test_every_method_in_this_process_fills_its_rows(workload, console, tmp_path):
    rows, failures = turns.collect(IN_PROCESS, workload, console, Worker)
    assert failures == []
    pairs = [(row.name, row.batch_size) for row in rows]
    assert pairs == [(name, 1) for name in IN_PROCESS] + [(name, 2) for name in IN_PROCESS if "assisted" not in name]
    for row in rows:
        assert len(row.tokens_per_s_by_turn) == len(workload.batches(row.cell))
        assert row.tokens_per_s == median(row.tokens_per_s_by_turn)
    check(rows)
    assert audit(rows, workload, console) == []
    rows[-1].texts[1][2] ^= 1
    [failure] = audit(rows, workload, console)
    assert failure.startswith("engine-speculative: a text at T=0.7 is not the target's: [Difference(position=2, ")
    compare.show(rows, workload, console)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "engine-speculative / engine-plain" in shown
    assert "audited: of 3 different texts, 3 are the target's, 0 but for near ties" in shown
    compare.write(rows, tmp_path / "rows.json")
    written: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    assert [Row(**row) for row in written] == rows


@pytest.mark.long
@pytest.mark.e2e
def test_the_served_application_fills_its_rows(workload, console, monkeypatch):
    monkeypatch.setattr(with_serve, "FIRST_SETTLE_S", 0.0)
    rows, failures = turns.collect(("serve-speculative",), workload, console)
    assert failures == []
    assert [row.batch_size for row in rows] == [1, 2]
    check(rows)
    assert audit(rows, workload, console) == []


class Failing(Worker):
    """A worker that fails at the second batch that it is asked for."""

    def __init__(self) -> None:
        self.num_speculative_tokens, self.is_closed = None, False

    def run(self, cell: Cell, index: int) -> Batch:
        if index == 1:
            raise RuntimeError("engine-speculative failed")
        return Batch(1.0, Acceptance())

    def close(self) -> None:
        self.is_closed = True


def test_nobody_always_follows_the_same_method():
    names = "plain", "speculative", "adaptive"
    asked = [name for turn in range(8) for name in turns.order(names, turn)]
    assert {pair for pair in pairwise(asked) if len(set(pair)) == 2} == set(permutations(names, 2))


def test_a_method_that_fails_is_named_and_the_others_go_on(workload, console):
    """The last one is a process, which runs what it is asked for until nobody asks."""

    def start(name: str, workload: Workload) -> Worker | WorkerProcess:
        if name == "engine-plain":
            raise RuntimeError("engine-plain failed")
        return failing if name == "engine-speculative" else WorkerProcess(name, workload)

    failing = Failing()
    names = ("engine-plain", "engine-speculative", "transformers")
    rows, failures = turns.collect(names, replace(workload, cells=[Cell(1, 0.0)]), console, start)
    assert [row.name for row in rows] == ["transformers"]
    assert failures == ["engine-plain failed", "engine-speculative failed"]
    assert failing.is_closed
