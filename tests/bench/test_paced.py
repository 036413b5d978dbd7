"""The paced command, from its arguments to its JSON, over workers that make up their figures."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from engine.errors import ConfigError
from engine.stats import SpeculationStats
from tests.bench import __main__ as command
from tests.bench import paced as paced_module
from tests.bench.figures import Batch, RoundSplit, RunAhead, Timeline
from tests.bench.paced import ARMS, methods_of, paced
from tests.bench.worker import Setting
from tests.bench.workload import Cell, Workload

ROUND_MS = {"plain": 16.0, "speculative": 20.0, "run-ahead": 17.0}


@dataclass(slots=True)
class MadeUp:
    """A worker whose rounds take a fixed time, in which each stream gets 1 token, or 3 with a draft."""

    name: str
    workload: Workload
    draft_lengths: list[int | None] = field(default_factory=lambda: [4])

    def run(self, cell: Cell, index: int) -> list[Batch]:
        assert self.workload.device == "paced:h100x4-70b+h100-1b"
        arm = self.name.split("-", 1)[1]
        round_s, length = ROUND_MS[arm] / 1e3, 1 if arm == "plain" else 3
        num_rounds = (self.workload.num_tokens - 1) // length
        drafts = 0 if length == 1 else num_rounds * cell.batch_size
        return [
            Batch(
                elapsed_s=num_rounds * round_s,
                timelines=[Timeline(0.0, [0.1, 1.0])] * cell.batch_size,
                speculation=SpeculationStats(
                    num_drafts=drafts, num_draft_tokens=4 * drafts, num_accepted_tokens=2 * drafts
                ),
                split=RoundSplit(num_rounds, round_s, 0.0145, 0.0, 0.0005, 0.0001),
                front_s=0.02,
                run_ahead=RunAhead(9, 1, 9, 1, 0.0027, 0.004) if arm == "run-ahead" else None,
            )
        ]

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in paced_module.ENVIRONMENT:
        monkeypatch.setenv(name, "unset")


def test_many_streams_have_a_pair_that_is_light_enough(workload: Workload, console: Console) -> None:
    used: dict[int, str] = {}

    class Noting(MadeUp):
        def run(self, cell: Cell, index: int) -> list[Batch]:
            used[cell.batch_size] = self.workload.target
            return MadeUp.run(self, cell, index)

    paced(workload, "h100x4-70b+h100-1b", console, streams=(8, 16), temperatures=(0.0,), arms=("plain",), start=Noting)
    assert used[8] == workload.target
    assert "paceline-pair-" in used[16]


def test_each_arm_has_a_cell_in_both_places_but_nobody_runs_ahead_in_one_process(
    workload: Workload, console: Console, tmp_path: Path
) -> None:
    options = {"streams": (1, 8), "temperatures": (0.0, 0.7), "json": tmp_path / "cells.json", "start": MadeUp}
    assert paced(workload, "h100x4-70b+h100-1b", console, **options) == []  # type: ignore[arg-type]
    assert os.environ["PACELINE_PACED"] == "1"
    cells = json.loads((tmp_path / "cells.json").read_text())
    labels = [(cell["place"], cell["name"], cell["streams"], cell["temperature"]) for cell in cells]
    assert labels == [
        (place, name, streams, temperature)
        for streams in (1, 8)
        for temperature in (0.0, 0.7)
        for place, name in (
            ("engine", "plain"),
            ("engine", "speculative"),
            ("serve", "plain"),
            ("serve", "speculative"),
            ("serve", "run-ahead"),
        )
    ]
    ahead = cells[4]
    assert ahead["gain"] == pytest.approx(20 / 17)
    assert ahead["hit_rate"] == 0.9
    assert ahead["hit_wait_ms"] == pytest.approx(0.3)
    assert all(cell["virtual_ratio"] > 0 for cell in cells)


def test_a_pair_that_does_not_exist_is_refused_before_anything_starts(workload: Workload, console: Console) -> None:
    with pytest.raises(ConfigError, match="tpu-8b"):
        paced(workload, "tpu-8b", console)


def test_arms_mean_a_draft_length_a_control_and_whether_the_draft_runs_ahead() -> None:
    assert methods_of(ARMS) == [
        "engine-plain",
        "engine-speculative",
        "serve-plain",
        "serve-speculative",
        "serve-run-ahead",
    ]
    meanings = {arm: tuple(Setting.of(arm, 4)) for arm in ("plain", "speculative", "run-ahead", "adaptive", "fixed-2")}
    assert meanings == {
        "plain": (0, "off", "off"),
        "speculative": (4, "fixed", "off"),
        "run-ahead": (4, "fixed", "on"),
        "adaptive": (4, "adaptive", "off"),
        "fixed-2": (2, "fixed", "off"),
    }
    assert Setting.of("adaptive-run-ahead", 4) == (4, "adaptive", "on")
    assert Setting.of("fixed-2-run-ahead", 4) == (2, "fixed", "on")
    for wrong in ("plain-run-ahead", "fixed", "fixed-x", "fast"):
        with pytest.raises(ValueError, match=wrong):
            Setting.of(wrong, 4)


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = {}

    def pretend(workload: Workload, pair: str, console: Console, **options: object) -> list[str]:
        seen.update(options, workload=workload, pair=pair)
        return ["it failed"]

    monkeypatch.setattr(command, "paced", pretend)
    arguments = ["paced", "--compile", "off", "--pair", "h100-8b+h100-1b", "--streams", "1,64", "--arms", "plain"]
    arguments += ["adaptive", "--turns", "3", "--temperatures", "0.5", "--json", str(tmp_path / "cells.json")]
    assert command.main(arguments) == 1
    assert (seen["pair"], seen["streams"], seen["temperatures"]) == ("h100-8b+h100-1b", (1, 64), (0.5,))
    assert (seen["arms"], seen["json"]) == (["plain", "adaptive"], tmp_path / "cells.json")
    workload = seen["workload"]
    assert isinstance(workload, Workload)
    assert (workload.num_tokens, workload.num_turns) == (256, 3)
    with pytest.raises(SystemExit):
        command.main(["paced", "--arms", "fast"])
