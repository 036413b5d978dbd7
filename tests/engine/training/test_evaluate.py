"""How prompts are read and figures shown and written; what the bundled pair is worth, test_pair measures."""

from pathlib import Path
from typing import ClassVar

import pytest

from engine.training import evaluate
from engine.training.evaluate import expected_length, read_prompts, run_ahead_bound, theorem_3_8

YES, NO = True, False


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
    # Running ahead gains the drafting time while it fits behind the target.
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
