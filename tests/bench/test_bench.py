"""The bench runs from end to end on models that cost nothing."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from rich.console import Console

from deployments.config import AppConfig
from engine.detokenizer import Detokenizer
from engine.stats import SpeculationStats
from tests.bench import bandwidth, compare, curves, prefill, timeline, turns, with_serve
from tests.bench.figures import Batch, RoundSplit, Row, RunAhead, Timeline, row_of
from tests.bench.profile import in_process
from tests.bench.spans import Spans
from tests.bench.with_engine import EngineMethod
from tests.bench.worker import Worker
from tests.bench.workload import Cell, Workload, read_prompts
from tests.deployments.conftest import model_dir, tokenizer  # noqa: F401
from tests.deployments.serving import serving

IN_PROCESS = ("transformers", "transformers-assisted", "engine-plain", "engine-speculative")


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def check(rows: list[Row]) -> None:
    assert all(row.tokens_per_s > 0 and row.ttft_ms > 0 and row.tpot_ms > 0 for row in rows)
    for row in rows:
        is_speculative = row.name in ("transformers-assisted", "engine-speculative", "serve-speculative")
        assert (row.acceptance_rate is not None) == is_speculative
        assert (row.mean_acceptance_length is not None) == is_speculative
        assert row.acceptance_rate is None or 0 <= row.acceptance_rate <= 1
        assert (row.round_overhead_ms is not None) == (not row.name.startswith("transformers"))


def test_every_method_in_this_process_fills_its_rows(workload: Workload, console: Console, tmp_path: Path) -> None:
    rows, failures = turns.collect(IN_PROCESS, workload, console, Worker)
    assert failures == []
    assert [(row.name, row.batch_size) for row in rows] == [
        ("transformers", 1),
        ("transformers-assisted", 1),
        ("engine-plain", 1),
        ("engine-speculative", 1),
        ("transformers", 2),
        ("engine-plain", 2),
        ("engine-speculative", 2),
    ]
    for row in rows:
        assert len(row.tokens_per_s_by_turn) == len(list(workload.batches(row.cell)))
        assert row.tokens_per_s == median(row.tokens_per_s_by_turn)
    check(rows)
    compare.show(rows, workload, console)
    assert "engine-speculative / engine-plain" in printed(console)
    compare.write(rows, tmp_path / "rows.json")
    written: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    assert [list(row) for row in written] == [[field.name for field in fields(Row)]] * len(rows)
    assert [Row(**row) for row in written] == rows


def test_a_workload_survives_the_way_to_its_process(workload: Workload) -> None:
    assert Workload.from_json(workload.to_json()) == workload


def test_prompts_are_tokens_of_bounded_length(workload: Workload) -> None:
    prompts = read_prompts(workload.target)
    assert len(prompts) >= 8
    assert all(0 < len(ids) <= 200 for ids in prompts)


def test_a_profile_names_the_parts_and_leaves_no_trace(workload: Workload, console: Console) -> None:
    append = Detokenizer.append
    in_process(workload, console)
    assert "verify: forward pass" in printed(console)
    assert "detokenizing" in printed(console)
    assert Detokenizer.append is append


def test_time_counts_for_the_innermost_span_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    class Work:
        def outer(self) -> None:
            nonlocal now
            now += 1
            self.inner()
            now += 2

        def inner(self) -> None:
            nonlocal now
            now += 4

    spans, work = Spans(), Work()
    spans.wrap(work, "outer", "outer")
    spans.wrap(work, "inner", "inner")
    work.outer()
    assert spans.seconds == {"outer": 3.0, "inner": 4.0}


def test_a_row_is_what_its_batches_become(workload: Workload) -> None:
    def batch(scale: float) -> Batch:
        timelines = [Timeline(0.0, [first * scale, 9.0 * scale]) for first in (1.0, 3.0)]
        return Batch(
            elapsed_s=10.0 * scale,
            timelines=timelines,
            speculation=SpeculationStats(num_drafts=4, num_draft_tokens=16, num_accepted_tokens=2),
            split=RoundSplit(4, 8.0 * scale, 4.0 * scale, 2.0 * scale, 0.5 * scale, 0.25 * scale),
            front_s=scale,
            run_ahead=RunAhead(6, 2, 3, 1, 0.5, 2.0 * scale),
            cpu_s={"Router": scale},
        )

    row = row_of("serve-run-ahead", 4, workload, Cell(2, 0.7), [batch(1.0), batch(1.0), batch(2.0)])
    assert row.tokens_per_s_by_turn == [0.8, 0.8, 0.4]
    assert (row.target_ms, row.draft_ms, row.wire_ms, row.delivery_ms, row.round_overhead_ms) == (
        4e3,
        2e3,
        500,
        250,
        2e3,
    )
    assert (row.ttft_ms, row.ttft_last_ms, row.front_ms) == (2500, 3000, 1000)
    assert (row.hit_rate, row.hit_rounds) == (0.75, 0.75)
    assert row.hit_wait_ms == pytest.approx(1.5e3 / 9)
    assert row.miss_wait_ms == pytest.approx(8e3 / 3)
    assert row.cpu_us == {"Router": 1e6 / 8}
    # Three tokens of each of two requests after the first ones, 1.5 of them per request and round.
    assert row.rows_per_round == pytest.approx(2 * 3 / 1.5 / 4)


def test_a_curve_is_drawn(
    workload: Workload, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(name: str, size: int) -> Row:
        rates = {"plain": [50.0, 60.0, 70.0], "speculative": [100.0, 200.0, 300.0], "adaptive": [150.0, 120.0, 300.0]}
        by_turn = rates[name.partition("-")[2]]
        return Row(name, size, 0.0, 4, 200.0, 5.0, 2.0, None, None, None, tokens_per_s_by_turn=by_turn)

    def collect(names: tuple[str, ...], workload: Workload, console: Console) -> tuple[list[Row], list[str]]:
        return [row(name, cell.batch_size) for name in names for cell in workload.cells], []

    monkeypatch.setattr(curves, "collect", collect)
    for draw in (curves.batch_curve, curves.load_curve):
        png = tmp_path / "curve.png"
        assert draw(workload, png, console) == []
        assert png.read_bytes().startswith(b"\x89PNG")
        png.unlink()
    assert "32 streams: adaptive / better of off and fixed = 1.00 (better: fixed, k = 4)" in printed(console)


def test_a_prompt_is_made_as_long_as_its_cell_says(workload: Workload) -> None:
    assert list(workload.batches(Cell(2, 0.0, 6)))[1] == [[10, 11, 12, 13, 5, 6], [5, 6, 7, 8, 9, 10]]
    assert next(workload.batches(Cell(3, 0.0, 5, is_last_late=True))) == [[5, 6, 7], [8, 9], [10, 11, 12, 13, 5]]


def test_the_time_of_a_late_prompt_counts_alone(workload: Workload) -> None:
    engine = EngineMethod(workload, 0)
    cell = Cell(3, 0.0, 100, is_last_late=True)
    *others, late = engine.run(next(workload.batches(cell)), cell).timelines
    assert all(other.arrivals_s[0] <= late.started_s < other.arrivals_s[-1] for other in others)


def test_prefill_has_a_row_for_every_length(
    workload: Workload, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PEERS_PYTHON", tmp_path / "nowhere")
    monkeypatch.setattr(prefill, "METHODS", ("transformers", "engine-plain"))
    monkeypatch.setattr(prefill, "LENGTHS", (8, 20))
    monkeypatch.setattr(prefill, "FULL_BATCH", 3)
    monkeypatch.setattr(prefill, "NUM_TOKENS", 2)
    monkeypatch.setattr(prefill, "collect", partial(turns.collect, start=Worker))
    rows, failures = prefill.prefill(workload, console)
    assert failures == []
    assert [(row.name, row.num_prompt_tokens, row.is_last_late) for row in rows] == [
        *((name, length, False) for length in (8, 20) for name in ("transformers", "engine-plain")),
        *(("engine-plain", length, True) for length in (8, 20)),
    ]
    assert "as the last of 3" in printed(console)


def test_bandwidth_counts_the_matrices_once(
    workload: Workload, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    monkeypatch.setattr(bandwidth, "SHAPE", shape | {"num_attention_heads": 2, "num_key_value_heads": 1})
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**16)
    found = bandwidth.bandwidth(workload, console)
    assert found.weight_bytes == 4 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 300 * 16)
    assert not found.is_compiled
    assert f"share {found.share:.0%}" in printed(console)


@pytest.mark.e2e
def test_rounds_are_recorded_and_drawn(workload: Workload, console: Console, tmp_path: Path) -> None:
    timeline.timeline(replace(workload, num_tokens=60), tmp_path / "timeline.png", console)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


class ServedHere:
    """A server in this process, and another process to be frozen in its place."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.pid = process.pid

    @contextmanager
    def frozen_afterwards(self) -> Iterator[None]:
        assert psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        yield

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def test_streams_over_http_fill_their_rows(
    workload: Workload,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    model_dir: Path,  # noqa: F811
) -> None:
    monkeypatch.setattr(with_serve, "FIRST_SETTLE_S", 0.0)
    config = AppConfig(target_model=str(model_dir), served_model_name="tiny")
    with serving(config, model_dir) as (url, _), subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setattr(with_serve, "Server", lambda *_: ServedHere(url, process))
        try:
            rows, failures = turns.collect(("serve-plain",), workload, console, Worker)
        finally:
            process.kill()
    assert failures == []
    assert [(row.name, row.batch_size) for row in rows] == [("serve-plain", 1), ("serve-plain", 2)]
    check(rows)


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
