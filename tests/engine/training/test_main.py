import json
from pathlib import Path

import pytest

from engine.training.__main__ import main
from engine.training.small_model import load_model


def options(target: Path, output: Path) -> list[str]:
    return f"--target {target} --output {output} --steps 6 --batch-tokens 128 --continuations 4 --no-compile".split()


def test_distill_writes_a_draft_and_reports_before_during_and_after(
    corpus: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["distill", str(corpus), *options(target, tmp_path), "--draft-size", "1x32", "--reports", "1"]
    assert main(command) == 0
    shown = capsys.readouterr().err
    for when in ("after 0 steps", "after 3 steps", "as written"):
        assert when in shown
    draft, _ = load_model(tmp_path)
    assert draft.config.num_hidden_layers == 1


def test_evaluate_shows_and_writes_figures(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the whale"}\n{"prompt": "a ship"}\n')
    paths = f"--prompts {tmp_path}/prompts.jsonl --json {tmp_path}/e.json".split()
    assert main(["evaluate", "--target", str(target), "--draft", str(target), "--k", "3", *paths]) == 0
    figures = json.loads((tmp_path / "e.json").read_text())
    assert set(figures) == {"temperatures", "held_out_loss"}
    assert set(figures["temperatures"]) == {"0", "0.7", "1"}
    assert figures["temperatures"]["1"]["acceptance_per_position"] == [1.0, 1.0, 1.0]
    assert figures["temperatures"]["1"]["mean_acceptance_length"] == 4.0
    assert figures["held_out_loss"] > 0
    assert "held-out loss" in capsys.readouterr().out


@pytest.fixture
def files(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {
        "empty.txt": "\n\n \n",
        "short.txt": "one\n\ntwo",
        "broken.txt.gz": "not gzip",
        "a.jsonl": '{"text": "x"}',
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "target").symlink_to(target)


HEAD = "head short.txt --target target --output x --continuations 0 --no-compile --steps 1"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pretrain nowhere.txt --output x", "no such file or directory: nowhere.txt"),
        ("pretrain empty.txt --output x", "no text in empty.txt"),
        ("pretrain broken.txt.gz --output x", "cannot read broken.txt.gz as text"),
        ("pretrain short.txt --output x --vocab-size 100", "the vocabulary has 100 tokens; it needs at least 259"),
        ("pretrain nowhere.txt --output x --size 12by192", "size '12by192' is not LAYERSxHIDDEN"),
        ("pretrain nowhere.txt --output x --steps 0", "--steps is 0"),
        ("distill nowhere.txt --target nowhere --output x", "nowhere is not a model directory"),
        (f"{HEAD} --taps 0 2", "the target has layers 1 to 2"),
        (f"{HEAD} --block-size 1", "block_size is 1; it must be from 2 to 64"),
        (f"{HEAD} --draft-vocab 4000", "draft_vocab is 4000; it must be from 0 to 300"),
        (f"{HEAD} --kind eagle3 --draft target", "a eagle3 head cannot start from a draft of type llama"),
        ("evaluate --prompts nowhere[red].txt", "cannot read nowhere[red].txt"),
        ("evaluate --prompts a.jsonl", "a.jsonl is not JSON lines with a prompt each"),
        ("evaluate --prompts empty.txt", "no prompts in empty.txt"),
    ],
)
def test_a_mistake_is_reported_on_one_line(
    command: str, message: str, files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 1
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
