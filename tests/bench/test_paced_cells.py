"""The figures of the paced comparison: against the roofline, and against each other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.execution.paced.parameters import HARDWARE, MODELS
from engine.execution.paced.roofline import decoding, pass_seconds
from tests.bench.figures import Row
from tests.bench.paced_cells import PacedCell, Pair, context_of, paced_cells, roofline_ms, write
from tests.bench.workload import Cell, Workload

PAIR = Pair.of("h100x4-70b+h100-1b")
NAMES = [
    "place",
    "name",
    "pair",
    "streams",
    "temperature",
    "tokens_per_s",
    "target_ms",
    "draft_ms",
    "added_ms",
    "ttft_ms",
    "hit_rate",
    "share_of_bound",
]


def row(name: str, **figures: float | list[float] | None) -> Row:
    """Return a row of rounds that take 20 ms, 15 and 3 of them in target and draft."""
    times = {"round_overhead_ms": 2.0, "draft_ms": 3.0, "target_ms": 15.0, "wire_ms": 1.0, "delivery_ms": 0.25}
    base = Row(name, 1, 0.7, 4, 100.0, 5.0, 2.0, None, None, None, rows_per_round=1.0, tokens_per_s_by_turn=[100.0])
    return replace(base, **{**times, **figures})  # type: ignore[arg-type]


def cells(workload: Workload, *rows: Row) -> dict[str, PacedCell]:
    return {f"{cell.place}-{cell.name}": cell for cell in paced_cells(rows, {}, PAIR, workload)}


def test_a_pairs_passes_are_those_of_its_devices_and_the_bound_hides_the_draft() -> None:
    context = 300
    verify_s = pass_seconds(decoding(8, 5, context), MODELS["70b"], HARDWARE["h100"], 4)
    draft_s = 4 * pass_seconds(decoding(8, 1, context), MODELS["1b"], HARDWARE["h100"], 1)
    assert PAIR.target_s(8.2, 4, 300.4) == verify_s
    assert PAIR.draft_s(8.2, 4, 300.4) == draft_s
    assert PAIR.bound(8, 4, context) == 1 + draft_s / verify_s
    with pytest.raises(ConfigError, match="70c"):
        Pair.of("h100x4-70c+h100-1b")


def test_what_is_added_is_the_round_less_the_passes_that_it_waits_for(workload: Workload) -> None:
    context = context_of(workload)
    assert context == 3 + workload.num_tokens / 2
    target_ms, draft_ms = (1e3 * seconds for seconds in (PAIR.target_s(1, 4, context), PAIR.draft_s(1, 4, context)))
    found = cells(
        workload,
        row("engine-plain", rows_per_round=2.0),
        row("serve-speculative"),
        row("serve-run-ahead", hit_rounds=0.75),
        row("serve-adaptive"),
        row("serve-fixed-2"),
    )
    assert found["engine-plain"].roof_ms == pytest.approx(1e3 * PAIR.target_s(2, 0, context))
    assert found["serve-speculative"].roof_ms == pytest.approx(target_ms + draft_ms)
    assert found["serve-speculative"].added_ms == pytest.approx(20 - target_ms - draft_ms)
    assert found["serve-speculative"].scheduling_ms == 0.75
    assert found["serve-run-ahead"].added_ms == pytest.approx(20 - target_ms - draft_ms / 4)
    assert found["serve-adaptive"].added_ms is None
    assert found["serve-fixed-2"].roof_ms == pytest.approx(
        1e3 * (PAIR.target_s(1, 2, context) + PAIR.draft_s(1, 2, context))
    )
    assert found["serve-run-ahead"].target_roof_ms == pytest.approx(target_ms)
    assert roofline_ms(row("serve-plain", rows_per_round=None), PAIR, workload) == (None, None)


def test_running_ahead_is_compared_with_its_bound_and_serving_with_the_same_method_in_process(
    workload: Workload,
) -> None:
    found = cells(
        workload,
        row("engine-speculative", tokens_per_s_by_turn=[200.0, 110.0, 300.0]),
        row("serve-speculative", tokens_per_s_by_turn=[100.0, 100.0, 100.0]),
        row("serve-run-ahead", tokens_per_s_by_turn=[110.0, 120.0, 115.0]),
    )
    ahead, speculative = found["serve-run-ahead"], found["serve-speculative"]
    assert ahead.gain == 1.15
    assert ahead.bound == PAIR.bound(1, 4, context_of(workload))
    assert ahead.share_of_bound == pytest.approx(0.15 / (ahead.bound - 1))
    assert speculative.over_engine == 0.5
    assert (speculative.gain, speculative.share_of_bound, ahead.over_engine) == (None, None, None)


def test_the_json_begins_with_the_agreed_names(workload: Workload, tmp_path: Path) -> None:
    rows = [row("serve-speculative"), row("serve-run-ahead", hit_rate=0.9)]
    ratios = {("serve-run-ahead", Cell(1, 0.7)): 1.01}
    write(list(paced_cells(rows, ratios, PAIR, workload)), tmp_path / "cells.json")
    first, last = json.loads((tmp_path / "cells.json").read_text())
    assert list(first)[: len(NAMES)] == NAMES
    assert [first[name] for name in NAMES[:5]] == ["serve", "speculative", "h100x4-70b+h100-1b", 1, 0.7]
    assert (last["hit_rate"], last["virtual_ratio"], first["virtual_ratio"]) == (0.9, 1.01, None)
