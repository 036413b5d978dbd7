"""What the comparison measures and says; the engine serves every candidate."""

import io

import pytest
from rich.console import Console

from engine.training.comparison import Served, candidates, measure, show
from engine.training.evaluate import read_tasks


def test_the_last_line_says_what_to_serve(target, tmp_path):
    plain, _, head, *_, own = candidates(target, [tmp_path], 2)
    assert own["self_draft_layers"] == 2
    for token_ms, serve in ((2.0, f"drafting=head draft_model={tmp_path}"), (8.0, "drafting=none")):
        console = Console(file=io.StringIO(), width=200)
        served = [Served(plain, [], {"all": 1.0}, 0.0, 6.0, 0.0), Served(head, [0.8], {"all": 1.8}, 1.2, token_ms, 5.5)]
        show(served, 2, 0.7, 3.6, console)
        assert console.file.getvalue().splitlines()[-1] == f"serve: {serve}"


def test_prompts_are_grouped_by_the_task_of_their_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one", "task": "code"}\n{"prompt": "two"}\n{"prompt": "three", "task": "code"}\n')
    assert read_tasks(path) == {"code": ["one", "three"], "all": ["two"]}
    text = tmp_path / "a.txt"
    text.write_text("one\n\ntwo")
    assert read_tasks(text) == {"all": ["one", "two"]}


@pytest.mark.parametrize("index", [1, 3])
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
