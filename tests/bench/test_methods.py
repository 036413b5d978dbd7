"""Contenders, their texts and the table of the comparison of methods."""

import json

from tests.bench.domains import _copied
from tests.bench.methods import contenders, methods


def test_only_pairs_that_the_engine_takes_are_measured():
    rows = list(contenders(["model", "suffix"], ["coupled", "rejection"], [2, 4]))
    assert [(row.method, row.num_tokens) for row in rows][:3] == [("none", 0), ("model", 2), ("model", 4)]
    assert rows[-1].settings["speculation"] == "adaptive"
    assert len(rows) == 1 + 2 * 2 * 2 + 1
    trees = list(contenders(["tree", "model"], ["block", "k_sequential"], [4]))
    assert [(row.method, row.verification) for row in trees[1:-1]] == [("tree", "k_sequential"), ("model", "block")]


def test_every_method_is_timed_and_its_text_compared_with_plain_decoding(workload, console, tmp_path):
    cells = methods(
        workload,
        console,
        large=False,
        names=["model", "ngram", "tree", "model+suffix"],
        rules=["coupled"],
        lengths=[2],
        temperatures=[0.0, 0.7],
        batch_sizes=[1],
        json_path=tmp_path / "cells.json",
        domain_names=["repeat", "own"],
    )
    named = {(cell.method, cell.temperature): cell for cell in cells}
    for heat in (0.0, 0.7):
        assert all(named[name, heat].exact for name in ("none", "model", "ngram", "tree", "model+suffix", "adaptive"))
        assert named["none", heat].speedup == 1.0
        assert named["none", heat].mean_acceptance_length == 1.0
        assert named["transformers-lookup", heat].tokens_per_s > 0
    assert len(json.loads((tmp_path / "cells.json").read_text())) == len(cells) == 2 * 9
    assert "Speed-up over plain decoding" in console.file.getvalue()


def test_text_to_be_copied_stands_twice_and_begins_again():
    assert _copied([*range(20)]) == [*range(20), *range(20), *range(16)]
