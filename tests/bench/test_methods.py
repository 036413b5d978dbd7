"""Contenders, their texts, and what the comparison of methods leaves out when its time is over."""

import functools
import json
from dataclasses import replace

import pytest

from tests.bench.domains import changed
from tests.bench.large_target import make_large_target
from tests.bench.method_turns import Contender, LoadedPair, contenders, copies_outputs, run
from tests.bench.methods import Selection, methods, show_parts

FIELDS = [
    "method",
    "verification",
    "num_tokens",
    "temperature",
    "batch_size",
    "domain",
    "mean_acceptance_length",
    "tokens_per_s",
    "speedup",
    "exact",
    "large",
]


def test_only_pairs_that_the_engine_takes_are_measured():
    rows = list(contenders(["model", "suffix"], ["coupled", "rejection"], [2, 4], ["model"]))
    assert [(row.name, row.num_tokens) for row in rows][:4] == [
        ("none", 0),
        ("model", 2),
        ("model", 4),
        ("model adaptive", 4),
    ]
    assert len(rows) == 1 + 2 * (3 + 2)
    trees = list(contenders(["tree", "model"], ["block", "k_sequential"], [4], []))
    assert [(row.method, row.verification) for row in trees[1:]] == [("tree", "k_sequential"), ("model", "block")]


@pytest.fixture
def selection():
    return Selection(
        methods=["model", "ngram", "tree", "model+suffix"],
        rules=["coupled"],
        lengths=[2],
        adaptive=["model"],
        temperatures=[0.0, 0.7],
        batch_sizes=[1, 2],
        domains=["repeat", "own"],
    )


def test_every_method_is_timed_and_its_text_compared_with_plain_decoding(workload, selection, console, tmp_path):
    path, png = tmp_path / "cells.json", tmp_path / "methods.png"
    cells = methods(workload, selection, console, json=path, png=png)
    named = {(cell.method, *cell.setting): cell for cell in cells}
    for size, heat in ((1, 0.0), (1, 0.7), (2, 0.0), (2, 0.7)):
        own = ("none", "model", "ngram", "tree", "model+suffix", "model adaptive")
        assert all(named[name, size, heat].exact for name in own)
        assert named["none", size, heat].speedup == named["none", size, heat].mean_acceptance_length == 1.0
        assert named["transformers", size, heat].exact == (heat == 0.0)
    assert named["transformers-lookup", 1, 0.0].exact
    written = json.loads(path.read_text())
    assert [list(fields) for fields in written] == [FIELDS] * (2 * (6 + 4) + 2 * (6 + 1))
    assert png.stat().st_size > 10_000
    printed = console.file.getvalue()
    for title in ("Speed-up over plain", "The fastest method", "Draft lengths chosen", "model+suffix /", "first token"):
        assert title in printed
    assert "weights: target" in printed


def test_what_there_is_no_time_for_is_named(workload, selection, console, tmp_path):
    brief = Selection(["ngram"], ["coupled"], [2], [], [0.0], [1], selection.domains, minutes=0.0)
    assert methods(workload, brief, console) == []
    assert "no time for" in console.file.getvalue()


def test_parts_of_a_comparison_are_shown_together(workload, selection, console, tmp_path):
    parts = []
    for heat in (0.0, 0.7):
        parts.append(tmp_path / f"{heat}.json")
        part = Selection(["ngram"], ["coupled"], [2], [], [heat], [1], selection.domains)
        methods(workload, part, console, json=parts[-1])
    whole, png = tmp_path / "whole.json", tmp_path / "whole.png"
    show_parts(parts, console, json=whole, png=png)
    assert json.loads(whole.read_text()) == [cell for part in parts for cell in json.loads(part.read_text())]
    assert png.exists()


def test_a_request_that_is_asked_again_differs_in_one_token():
    ids = [*range(30)]
    for nth in (0, 3):
        assert [place for place in range(30) if changed(ids, nth)[place] != ids[place]] == [20 + nth]
    assert changed([7], 2) == [6]


def test_only_methods_that_copy_write_the_earlier_answers_first(workload):
    pair = LoadedPair(workload, max_num_seqs=1, max_length=40)
    prompt = [5, 6, 7, 8]
    for name, is_shorter in (("suffix", True), ("model+suffix", True), ("ngram", False)):
        row = Contender(name, "coupled", 8, {"speculation": "fixed"})
        passes = []
        for remembers in (False, True):
            engine = pair.engine(row, remembers_outputs=remembers)
            passes += [run(engine, [prompt], 1.0, 24).passes for _ in range(2)]
        assert copies_outputs(engine) == is_shorter
        assert (passes[3] < passes[1]) == is_shorter


def test_the_output_says_how_the_large_target_was_made(workload, selection, console, monkeypatch):
    small = functools.partial(make_large_target, num_layers=2, intermediate_size=64)
    monkeypatch.setattr("tests.bench.methods.make_large_target", small)
    large = replace(selection, methods=["model"], adaptive=[], temperatures=[0.0], batch_sizes=[1], large=True)
    cells = methods(workload, large, console)
    assert all(cell.large for cell in cells)
    assert all(cell.exact for cell in cells if not cell.is_peer)
    printed = " ".join(console.file.getvalue().split())
    assert "The large target was made for this measurement" in printed
