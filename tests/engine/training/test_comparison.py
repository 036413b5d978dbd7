"""What the comparison measures and says; the engine serves every candidate."""

import io

import pytest
from rich.console import Console

from engine.training import comparison
from engine.training.comparison import PLAIN, Served, candidates, measure, show
from engine.training.evaluate import read_tasks


def printed(served, price=None):
    console = Console(file=io.StringIO(), width=200)
    show(served, 2, 0.7, price, console)
    return console.file.getvalue()


def test_the_last_line_says_what_to_serve():
    plain = Served(PLAIN, [], {"all": 1.0}, 0.0, 6.0, 0.0)
    head = Served({"drafting": "head", "draft_model": "h"}, [0.8, 0.5], {"all": 2.3}, 1.25, 2.0, 5.5)
    text = printed([plain, head], price=3.6)
    assert text.splitlines()[-1] == "serve: drafting=head draft_model=h"
    row = next(line for line in text.splitlines() if line.startswith("│ head h"))
    assert [cell.strip() for cell in row.split("│")[2:-1]] == (
        ["0.800", "0.500", "2.30", "1.25", "5.5", "2.00", "3.00", "2.000"]
    )
    slow = Served(head.settings, [0.1], {"all": 1.1}, 9.0, 8.0, 5.5)
    assert printed([plain, slow]).splitlines()[-1] == "serve: drafting=none"


def test_acceptance_is_told_by_task_if_there_are_several():
    tasks = {"code": 2.5, "prose": 1.5}
    assert "2.50 │  1.50" in printed([Served(PLAIN, [1.0], tasks, 0.0, 1.0, 0.0)])


def test_prompts_are_grouped_by_the_task_of_their_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one", "task": "code"}\n{"prompt": "two"}\n{"prompt": "three", "task": "code"}\n')
    assert read_tasks(path) == {"code": ["one", "three"], "all": ["two"]}
    text = tmp_path / "a.txt"
    text.write_text("one\n\ntwo")
    assert read_tasks(text) == {"all": ["one", "two"]}


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_every_candidate_is_served_and_timed(target, index):
    settings = candidates(target, [], 1)[index]
    tasks = {"a": ["the whale swam the whale swam"], "b": ["night"]}
    served = measure(target, settings | {"compile": "off", "dtype": "float32"}, tasks, 3, 0.0, 16)
    assert set(served.lengths) == {"a", "b"}
    assert served.token_ms > served.draft_ms / 4
    if settings["drafting"] == "model":  # the target itself: all is accepted, unless the text ends
        assert served.per_position[0] == 1
        assert served.megabytes > 0
    assert (served.draft_ms > 0) == (settings["drafting"] != "none")


def test_candidates_are_named_by_their_settings(target, tmp_path):
    names = [Served(one, [], {}, 0, 1, 0).name for one in candidates(None, [tmp_path], 0)]
    assert names == ["drafting=none", f"drafting=head draft_model={tmp_path}", "drafting=suffix"]
    assert comparison.candidates(target, [], 2)[-1]["self_draft_layers"] == 2
