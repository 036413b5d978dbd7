"""How prompts are read and figures shown and written; what the bundled pair is worth, test_pair measures."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from engine.training import evaluate
from engine.training.acceptance import Acceptance
from engine.training.errors import TrainingError
from engine.training.evaluate import Evaluation, draw_chart, read_prompts, show, write_json

YES, NO = True, False
ACCEPTANCE = Acceptance([[YES, YES, NO] * 5])
EVALUATION = Evaluation({0.0: ACCEPTANCE, 0.7: ACCEPTANCE}, t_draft_ms=0.25, t_target_ms=2.0, held_out_loss=3.25)


def shown(evaluation: Evaluation) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(evaluation, 2, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "one\ntwo\n\n\n  three\n", ["one\ntwo", "  three"]),
        ("a.jsonl", '{"prompt": "one\\n\\ntwo"}\n\n{"prompt": "three", "id": 5}\n', ["one\n\ntwo", "three"]),
    ],
)
def test_prompts_are_paragraphs_or_json_lines(name: str, text: str, prompts: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == prompts


@pytest.mark.parametrize("text", ["no json", '{"text": "x"}', "[1]"])
def test_json_lines_without_a_prompt_each_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(TrainingError, match="is not JSON lines with a prompt each"):
        read_prompts(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_without_prompts_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\n\n")
    with pytest.raises(TrainingError, match="no prompts"):
        read_prompts(tmp_path / name)


def test_the_cost_ratio_is_that_of_the_draft_to_the_target() -> None:
    assert EVALUATION.cost_ratio == 0.125


def test_tables_show_acceptance_cost_loss_and_the_speed_up_of_every_length() -> None:
    text = shown(EVALUATION)
    assert "position 2" in text
    assert "position 3" not in text
    assert "3.00" in text  # two accepted tokens a round, and the target's own
    assert "cost ratio 0.125, held-out loss 3.250 nats/token" in text
    assert text.count(" | ") >= 2 * 12
    assert "held-out" not in shown(Evaluation({0.0: ACCEPTANCE}, 0.25, 2.0, None))


def test_figures_are_written_as_json(tmp_path: Path) -> None:
    write_json(EVALUATION, 2, tmp_path / "e.json")
    assert json.loads((tmp_path / "e.json").read_text()) == {
        "temperatures": {
            name: {"acceptance_per_position": [1.0, 1.0], "mean_acceptance_length": 3.0} for name in ("0", "0.7")
        },
        "t_draft_ms": 0.25,
        "t_target_ms": 2.0,
        "held_out_loss": 3.25,
    }


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    draw_chart(EVALUATION, tmp_path / "e.png")
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


def test_a_pair_is_measured_on_its_own_text_and_its_loss_is_read_or_measured(
    target: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "decode_step_ms", lambda folders: [1.0, 4.0])
    recorded = evaluate.evaluate(target, target, ["the whale"], [])
    measured = evaluate.evaluate(target, target, ["the whale"], [corpus])
    assert recorded.acceptance[1.0].rate() == 1.0
    assert recorded.cost_ratio == 0.25
    assert recorded.held_out_loss == pytest.approx(measured.held_out_loss, rel=0.01)
