"""The paced command, from its arguments to its JSON, over workers that make up their figures."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.figures import Batch, RoundSplit, RunAhead, Timeline
from tests.bench.paced.comparison import paced
from tests.bench.workload import Cell, Setting, Workload
from tests.load.records import Acceptance

PAIR = "h100x4-70b+h100-1b"
ROUND_MS = {"plain": 16.0, "speculative": 20.0, "run-ahead": 17.0}


@dataclass(slots=True)
class MadeUp:
    """A worker whose rounds take a fixed time, in which each stream gets 1 token, or 3 with a draft."""

    name: str
    workload: Workload
    draft_lengths: list[int | None] = field(default_factory=lambda: [4])

    def run(self, cell: Cell, index: int) -> list[Batch]:
        assert os.environ["PACELINE_PACED"] == PAIR
        # With many streams the pair must be light enough.
        assert ("paceline-pair-" in self.workload.target) == (cell.batch_size > 4)
        arm = self.name.split("-", 1)[1]
        round_s, length = ROUND_MS[arm] / 1e3, 1 if arm == "plain" else 3
        num_rounds = (self.workload.num_tokens - 1) // length
        drafts = 0 if length == 1 else num_rounds * cell.batch_size
        timelines = [Timeline(0.0, [0.1, 1.0])] * cell.batch_size
        split = RoundSplit(num_rounds, round_s, 0.0145, 0.0, 0.0005, 0.0001)
        ahead = RunAhead(9, 1, 9, 1, 0.0027, 0.004) if arm == "run-ahead" else None
        acceptance = Acceptance(drafts, 4 * drafts, 2 * drafts)
        return [Batch(num_rounds * round_s, timelines, acceptance, split, ahead)]

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_each_arm_has_a_cell_in_both_places_but_nobody_runs_ahead_in_one_process(
    workload: Workload, console: Console, tmp_path: Path
) -> None:
    settings = [Cell(size, heat) for size in (1, 8) for heat in (0.0, 0.7)]
    files = {"json": tmp_path / "cells.json", "png": tmp_path / "paced.png"}
    assert paced(replace(workload, cells=settings), PAIR, list(ROUND_MS), console, start=MadeUp, **files) == []
    assert "PACELINE_PACED" not in os.environ
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    cells = json.loads(files["json"].read_text())
    names = ["engine-plain", "engine-speculative", "serve-plain", "serve-speculative", "serve-run-ahead"]
    assert [(cell["row"]["name"], Cell(cell["row"]["batch_size"], cell["row"]["temperature"])) for cell in cells] == [
        (name, cell) for cell in settings for name in names
    ]
    assert cells[4]["gain"] == pytest.approx(20 / 17)
    assert cells[4]["row"]["hit_rate"] == 0.9
    assert cells[4]["row"]["hit_wait_ms"] == pytest.approx(0.3)


def test_arms_mean_a_draft_length_a_control_and_whether_the_draft_runs_ahead() -> None:
    meanings = {
        "plain": (0, "off", "off"),
        "speculative": (4, "fixed", "off"),
        "run-ahead": (4, "fixed", "on"),
        "adaptive": (4, "adaptive", "off"),
        "adaptive-run-ahead": (4, "adaptive", "on"),
        "fixed-2": (2, "fixed", "off"),
        "fixed-2-run-ahead": (2, "fixed", "on"),
    }
    assert {arm: tuple(Setting.of(arm, 4)) for arm in meanings} == meanings
    for wrong in ("plain-run-ahead", "fixed", "fixed-x", "fast"):
        with pytest.raises(ValueError, match=wrong):
            Setting.of(wrong, 4)
