"""The figures of the paced comparison: against the roofline, and against each other."""

from dataclasses import replace

import pytest

from tests.bench.figures import Row
from tests.bench.paced.roofline import Pair
from tests.bench.paced.tables import PacedCell, paced_cells
from tests.bench.workload import Workload

PAIR = Pair.of("h100x4-70b+h100-1b")


def row(name: str, **figures: float | list[float] | None) -> Row:
    """Return a row of rounds that take 20 ms."""
    base = Row(name, 1, 0.7, 4, 100.0, 5.0, 2.0, round_ms=20.0, rows_per_round=1.0, tokens_per_s_by_turn=[100.0])
    return replace(base, **figures)  # type: ignore[arg-type]


def cells(workload: Workload, *rows: Row) -> dict[str, PacedCell]:
    return {cell.row.name: cell for cell in paced_cells(rows, PAIR, workload)}


def test_what_is_added_is_the_round_less_the_passes_that_it_waits_for(workload: Workload) -> None:
    context = 3 + workload.num_tokens / 2
    target_ms, draft_ms = (1e3 * seconds for seconds in (PAIR.target_s(1, 4, context), PAIR.draft_s(1, 4, context)))
    two_ms = 1e3 * (PAIR.target_s(1, 2, context) + PAIR.draft_s(1, 2, context))
    measured = cells(
        workload,
        row("engine-plain", rows_per_round=2.0),
        row("serve-plain", rows_per_round=None),
        row("serve-speculative"),
        row("serve-run-ahead", hit_rounds=0.75),
        row("serve-adaptive"),
        row("serve-fixed-2"),
    )
    assert {name: cell.added_ms for name, cell in measured.items()} == {
        "engine-plain": pytest.approx(20 - 1e3 * PAIR.target_s(2, 0, context)),
        "serve-plain": None,
        "serve-speculative": pytest.approx(20 - target_ms - draft_ms),
        "serve-run-ahead": pytest.approx(20 - target_ms - draft_ms / 4),
        "serve-adaptive": None,
        "serve-fixed-2": pytest.approx(20 - two_ms),
    }
    assert measured["serve-run-ahead"].target_roof_ms == pytest.approx(target_ms)


def test_tokens_are_counted_by_gpu_and_the_drafts_is_one(workload: Workload) -> None:
    measured = cells(workload, row("engine-plain"), row("serve-speculative"), row("serve-adaptive"))
    per_gpu = {name: cell.tokens_per_s_per_gpu for name, cell in measured.items()}
    assert per_gpu == {"engine-plain": 25.0, "serve-speculative": 20.0, "serve-adaptive": 20.0}


def test_running_ahead_is_compared_with_its_bound_and_serving_with_the_same_method_in_process(
    workload: Workload,
) -> None:
    measured = cells(
        workload,
        row("engine-speculative", tokens_per_s_by_turn=[200.0, 110.0, 300.0]),
        row("serve-speculative", tokens_per_s_by_turn=[100.0, 100.0, 100.0]),
        row("serve-run-ahead", tokens_per_s_by_turn=[110.0, 120.0, 115.0]),
    )
    ahead, speculative = measured["serve-run-ahead"], measured["serve-speculative"]
    assert ahead.gain == 1.15
    assert ahead.share_of_bound == pytest.approx(0.15 / (PAIR.bound(1, 4, 3 + workload.num_tokens / 2) - 1))
    assert speculative.over_engine == 0.5
    assert (speculative.gain, speculative.share_of_bound, ahead.over_engine) == (None, None, None)
