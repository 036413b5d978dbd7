"""How prompts are read and figures shown and written; what the bundled pair is worth, test_pair measures."""

import io
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from engine.training import evaluate
from engine.training.checkpoint import TrainingError
from engine.training.evaluate import Evaluation, expected_length, read_prompts, run_ahead_bound, show, theorem_3_8
from engine.training.measured_acceptance import Acceptance

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


def test_tables_show_acceptance_cost_loss_and_the_speed_up_of_every_length() -> None:
    text = shown(EVALUATION)
    assert "position 2" in text
    assert "position 3" not in text
    assert "3.00" in text  # two accepted tokens a round, and the target's own
    assert "cost ratio 0.125, held-out loss 3.250 nats/token" in text
    assert text.count(" | ") >= 2 * 12
    assert "held-out" not in shown(Evaluation({0.0: ACCEPTANCE}, 0.25, 2.0, None))


def test_a_pair_is_measured_on_its_own_text_and_its_loss_is_read_or_measured(
    target: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "decode_step_ms", lambda folders: [1.0, 4.0])
    recorded = evaluate.evaluate(target, target, ["the whale"], [])
    measured = evaluate.evaluate(target, target, ["the whale"], [corpus])
    assert recorded.acceptance[1.0].rate() == 1.0
    assert recorded.cost_ratio == 0.25
    assert recorded.held_out_loss == pytest.approx(measured.held_out_loss, rel=0.01)


def test_the_formulas_give_the_published_figures() -> None:
    # Leviathan et al.: alpha 0.8, k 5, a free draft: 3.69x.
    assert theorem_3_8(0.8, 5, 0.0) == pytest.approx(3.69, abs=0.005)
    assert theorem_3_8(0.6, 1, 0.2) == pytest.approx((1 + 0.6) / (1 + 0.2))
    assert expected_length(1.0, 4) == 5.0


def test_running_ahead_gains_the_drafting_time_while_it_fits_behind_the_target() -> None:
    assert run_ahead_bound(0.7, 4, 0.1) == pytest.approx(theorem_3_8(0.7, 4, 0.1) * (1 + 4 * 0.1))
    assert run_ahead_bound(0.7, 9, 0.2) == pytest.approx(expected_length(0.7, 9) / 2)


class Step:
    """A decode step that takes as long as its folder's name says, and more every third time."""

    order: ClassVar[list[str]] = []

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.count = 0

    def time_ms(self) -> float:
        self.order.append(self.name)
        self.count += 1
        return float(self.name) * (10 if self.count % 3 == 0 else 1)


def test_models_are_timed_in_turn_and_their_medians_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_DecodeStep", Step)
    monkeypatch.setattr(Step, "order", [])
    assert evaluate.decode_step_ms([Path("2"), Path("5")]) == [2.0, 5.0]
    assert Step.order == ["2", "5"] * (len(Step.order) // 2)


def test_a_step_computes_one_token_behind_a_full_context(target: Path) -> None:
    step = evaluate._DecodeStep(target)
    assert step.batch.token_ids.tolist() == [1]
    assert step.batch.positions.tolist() == [63]  # of a model with 64
    assert step.time_ms() > 0
