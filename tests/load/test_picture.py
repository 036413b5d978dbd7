"""Pictures are drawn whatever came of the requests."""

from pathlib import Path

import pytest

from tests.load.picture import draw_run, draw_sweep
from tests.load.records import Record
from tests.load.slo import Slo
from tests.load.summary import summarize
from tests.load.sweep import Level

SLO = Slo((("ttft", 500.0), ("itl", 50.0)), 0.9)


def request(index: int, arm: str, outcome: str = "ok") -> Record:
    chunks = [(0.1 * index + 0.1, 1), (0.1 * index + 0.3, 5)] if outcome == "ok" else []
    return Record(index, "d", 0.1 * index, 0.1 * index, arm=arm, outcome=outcome, chunks=chunks, num_tokens=5, end_s=1)


@pytest.mark.parametrize("outcomes", [("ok", "ok"), ("ok", "503"), ("503", "429")])
@pytest.mark.parametrize("slo", [SLO, None])
def test_a_run_is_drawn(tmp_path: Path, outcomes: tuple[str, str], slo: Slo | None) -> None:
    records = [request(i, arm, outcome) for arm in ("off", "on") for i, outcome in enumerate(outcomes)]
    draw_run(records, slo, tmp_path / "new" / "load.png")
    assert (tmp_path / "new" / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("outcome", ["ok", "503"])
def test_a_sweep_is_drawn(tmp_path: Path, outcome: str) -> None:
    figures = summarize([request(0, "off", outcome), request(1, "off", outcome)], SLO)
    levels = [Level(arm, load, figures, load < 3) for arm in ("off", "on") for load in (1, 2, 3, 4)]
    draw_sweep(levels, SLO, "users", tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
