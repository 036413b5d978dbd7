import json
from pathlib import Path

import pytest

from engine.training.__main__ import main
from engine.training.small_model import Size, build_model, load_model, train_tokenizer


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
    assert set(figures) == {"temperatures", "t_draft_ms", "t_target_ms", "held_out_loss"}
    assert set(figures["temperatures"]) == {"0", "0.7", "1"}
    assert figures["temperatures"]["1"]["acceptance_per_position"] == [1.0, 1.0, 1.0]
    assert figures["temperatures"]["1"]["mean_acceptance_length"] == 4.0
    assert figures["held_out_loss"] > 0
    assert "cost ratio" in capsys.readouterr().out


def test_a_draft_with_another_tokenizer_is_one_line(
    corpus: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train_tokenizer(["other words entirely " * 20], vocab_size=270, context=64)
    build_model(Size.parse("1x32"), tokenizer, seed=0).save_pretrained(tmp_path / "draft")
    tokenizer.save_pretrained(tmp_path / "draft")
    assert main(["distill", str(corpus), *options(target, tmp_path), "--draft", str(tmp_path / "draft")]) == 1
    # transformers shows before how far it is.
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the draft")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pretrain nowhere.txt --output x", "no such file or directory: nowhere.txt"),
        ("pretrain nowhere.txt --output x --size 12by192", "size '12by192' is not LAYERSxHIDDEN"),
        ("pretrain nowhere.txt --output x --steps 0", "--steps is 0"),
        ("distill nowhere.txt --target nowhere --output x", "nowhere is not a model directory"),
        ("evaluate --prompts nowhere[red].txt", "cannot read nowhere[red].txt"),
        ("evaluate --k 0", "--k is 0"),
    ],
)
def test_a_mistake_is_reported_on_one_line(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 1
    shown = capsys.readouterr().err.strip()
    assert message in shown
    assert shown.count("\n") == 0
