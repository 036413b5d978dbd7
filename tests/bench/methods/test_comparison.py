"""Contenders and their texts."""

from argparse import Namespace

import pytest

from tests.bench.methods import comparison
from tests.bench.methods.comparison import methods
from tests.bench.methods.pairs import Contender, LoadedPair, copies_outputs, run


@pytest.fixture
def options():
    return Namespace(
        methods=["model", "ngram", "tree", "model+suffix"],
        rules=["coupled"],
        lengths=[2],
        temperatures=[0.0, 0.7],
        batch_sizes=[1, 2],
        large=False,
    )


def test_every_method_is_timed_and_its_text_compared_with_plain_decoding(workload, options, console, monkeypatch):
    monkeypatch.setattr(comparison, "read_domains", lambda _: {"repeat": workload.prompts})
    cells = methods(options, workload, console)
    named = {(cell.contender.name, cell.cell.batch_size, cell.cell.temperature): cell for cell in cells}
    for size, heat in ((1, 0.0), (1, 0.7), (2, 0.0), (2, 0.7)):
        names = ("none", "model", "ngram", "tree", "model+suffix", "model adaptive")
        assert all(named[name, size, heat].exact for name in names)
        assert named["none", size, heat].speedup == named["none", size, heat].mean_acceptance_length == 1.0


def test_only_methods_that_copy_write_the_earlier_answers_first(workload):
    pair = LoadedPair(workload, max_num_seqs=1, max_length=40)
    for name, copies in (("suffix", True), ("model+suffix", True), ("ngram", False)):
        row = Contender(name, "coupled", 8)
        engines = [pair.engine(row, remembers_outputs=remembers) for remembers in (False, True)]
        assert [copies_outputs(engine) for engine in engines] == [copies] * 2
        if name != "model+suffix":  # this draft needs no copies
            forgetful, remembering = ([run(engine, [[5, 6, 7, 8]], 1.0, 24) for _ in range(2)] for engine in engines)
            assert (remembering[1].tokens_per_pass > forgetful[1].tokens_per_pass) == copies
