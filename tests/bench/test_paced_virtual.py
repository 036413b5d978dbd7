"""Virtual time over the pair that was measured: what it adds up, and what it takes from the measurement."""

from dataclasses import replace

import pytest
from rich.console import Console

from engine.config import ModelConfig
from engine.execution.paced.roofline import Work, decoding
from engine.execution.registry import load_backend
from tests.bench.figures import Row
from tests.bench.paced_cells import Pair
from tests.bench.paced_virtual import calibrating, delays_of, run, virtual_ratios
from tests.bench.virtual_time import Delays
from tests.bench.with_engine import EngineMethod
from tests.bench.workload import Cell, Workload

PAIR = Pair.of("h100x4-70b+h100-1b")
PROMPT = [5, 6, 7]


def row(name: str, **figures: float | list[float] | None) -> Row:
    base = Row(name, 1, 0.7, 4, 100.0, 5.0, 2.0, None, None, None, rows_per_round=1.0, ttft_last_ms=5.0)
    return replace(base, **figures)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def models(workload: Workload):
    return tuple(load_backend(ModelConfig(path)) for path in (workload.target, workload.draft))


def test_plain_rounds_take_their_passes_and_what_is_added(workload: Workload, models) -> None:
    delays = Delays(network_s=1e-3, draft_s=9.0, round_s=0.5e-3)
    rate = run(row("serve-plain", front_ms=7.0), [PROMPT], models, PAIR, delays, workload)
    prompt_s = PAIR.target.pass_seconds(Work(3, 1, 3, 1 + 2 + 3))
    passes_s = sum(PAIR.target.pass_seconds(decoding(1, 1, 3 + index)) for index in range(1, workload.num_tokens))
    seconds = prompt_s + passes_s + workload.num_tokens * 2.5e-3 + 7e-3
    assert rate == pytest.approx(workload.num_tokens / seconds)


def test_speculation_makes_the_rounds_that_the_engine_makes(workload: Workload, models) -> None:
    """As many, with the same drafts: texts and acceptance are those of the models, at any temperature."""
    workload = replace(workload, num_tokens=24)
    measured = EngineMethod(workload, 4).run([PROMPT], Cell(1, 0.7))
    in_turn_s = workload.num_tokens / run(row("serve-speculative"), [PROMPT], models, PAIR, Delays(), workload)
    with_network = Delays(network_s=1.0)
    far_s = workload.num_tokens / run(row("serve-speculative"), [PROMPT], models, PAIR, with_network, workload)
    # To the target and back in each round, and to the draft and back in those that have one.
    assert far_s - in_turn_s == pytest.approx(2 * measured.speculation.num_rounds + 2 * measured.speculation.num_drafts)


def test_requests_arrive_as_far_apart_as_their_first_tokens_come(workload: Workload, models) -> None:
    at_once = run(row("serve-plain"), [PROMPT, PROMPT], models, PAIR, Delays(), workload)
    apart = run(row("serve-plain", ttft_last_ms=505.0), [PROMPT, PROMPT], models, PAIR, Delays(), workload)
    # The second one comes a second after the first one, which is over by then.
    assert 2 * workload.num_tokens / apart == pytest.approx(2 * workload.num_tokens / at_once, rel=1.1)
    assert apart < at_once


def test_delays_are_what_was_measured_besides_the_passes(workload: Workload) -> None:
    context = 3 + workload.num_tokens / 2
    target_ms, draft_ms = 1e3 * PAIR.target_s(2, 4, context), 1e3 * PAIR.draft_s(2, 4, context)
    measured = row(
        "serve-speculative",
        rows_per_round=2.0,
        target_ms=target_ms + 0.25,
        draft_ms=draft_ms + 0.125,
        round_overhead_ms=3.0,
        wire_ms=1.0,
        delivery_ms=0.5,
    )
    delays = delays_of(measured, PAIR, workload)
    assert delays == pytest.approx(Delays(0.25e-3, 0.125e-3, 2.25e-3))
    assert delays_of(row("serve-speculative"), PAIR, workload) is None


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("engine-plain", "engine-plain"),
        ("serve-run-ahead", "serve-speculative"),
        ("serve-adaptive", "serve-speculative"),
        ("serve-adaptive-run-ahead", "serve-speculative"),
        ("serve-fixed-2", "serve-fixed-2"),
        ("serve-fixed-2-run-ahead", "serve-fixed-2"),
    ],
)
def test_what_runs_ahead_is_predicted_from_what_does_not(name: str, source: str) -> None:
    assert calibrating(name) == source


def test_each_cell_is_repeated_and_divided_by_its_own_turns(
    workload: Workload, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"round_overhead_ms": 1.0, "draft_ms": 0.0, "target_ms": 16.0, "wire_ms": 0.0, "delivery_ms": 0.0}
    plain = row("engine-plain", tokens_per_s_by_turn=[50.0, 100.0, 25.0, 200.0, 1.0], **figures)
    alone = row("serve-run-ahead", tokens_per_s_by_turn=[50.0], **figures)
    monkeypatch.setattr("tests.bench.paced_virtual.run", lambda *_: 100.0)
    assert virtual_ratios([plain, alone], PAIR, workload, console) == {("engine-plain", plain.cell): 1.5}
