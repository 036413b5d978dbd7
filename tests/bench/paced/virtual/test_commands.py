"""The command `twin`, from its arguments to its files, and the figures that it makes of what it measured."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.commands import parse
from tests.bench.paced.group import Arm
from tests.bench.paced.virtual.commands import twin
from tests.bench.paced.virtual.measures import Lead


def test_parts_are_measured_printed_drawn_and_written(tmp_path: Path) -> None:
    console, file = Console(file=StringIO(), width=250), tmp_path / "rows.json"
    short = ["--warm", "4", "--num-tokens", "4", "--rows", "2", "--pairs", "h100-8b+h100-1b", "--json", str(file)]
    options = parse(
        ["twin", "hidden", "pool", "calibration", *short, "--arms", "speculative", "run-ahead", "--groups", "2"]
    )
    assert twin(options, console, tmp_path) == []
    in_turn, ahead, pooled, own, beside, *calibrated = json.loads(file.read_text())
    assert (in_turn["gain"], ahead["timed"]["arm"]) == (1.0, "run-ahead")
    assert ahead["free_gain"] > 1
    assert ahead["share_of_bound"] == pytest.approx((ahead["gain"] - 1) / (ahead["bound"] - 1))
    assert [(one["place"], one["num_gpus"]) for one in (pooled, own, beside)] == [
        ("pool", 3),
        ("own", 4),
        ("beside", 2),
    ]
    assert [one["temperature"] for one in calibrated] == ["0", "0.7", "1"]
    assert all(sum(one["reliability"]["counts"]) > 0 for one in calibrated)
    for name in ("hidden.png", "pool.png", "calibration.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_lead_has_an_interval_if_there_are_several_seeds() -> None:
    assert Lead("pair", 8, "0", "plain", [1.0]).half_width != Lead("pair", 8, "0", "plain", [1.0]).half_width
    three = Lead("pair", 8, "0", "plain", [0.9, 1.0, 1.1])
    assert three.mean == pytest.approx(1.0)
    assert three.half_width == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)


def test_arms_mean_a_length_who_chooses_it_and_what_overlaps_a_verification() -> None:
    meanings = {
        "plain": (0, "off", ("none",)),
        "speculative": (4, "fixed", ("none",)),
        "run-ahead": (4, "fixed", ("ahead",)),
        "fixed-2-alternate": (2, "fixed", ("alternate",)),
        "adaptive": (4, "adaptive", ("none",)),
        "adaptive-any": (4, "adaptive", ("none", "ahead", "alternate")),
    }
    arms = {name: Arm.of(name, 4) for name in meanings}
    assert {name: (arm.k, arm.speculation, arm.overlaps) for name, arm in arms.items()} == meanings
    for wrong in ("plain-alternate", "fixed", "fixed-x", "fast"):
        with pytest.raises(ValueError, match=wrong):
            Arm.of(wrong, 4)
