"""What is timed; how long it takes, no test says."""

from pathlib import Path
from typing import ClassVar

import pytest

from engine.training import cost


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
    monkeypatch.setattr(cost, "_DecodeStep", Step)
    monkeypatch.setattr(Step, "order", [])
    assert cost.decode_step_ms([Path("2"), Path("5")]) == [2.0, 5.0]
    assert Step.order == ["2", "5"] * (len(Step.order) // 2)


def test_a_step_computes_one_token_behind_a_full_context(target: Path) -> None:
    step = cost._DecodeStep(target)
    assert step.batch.token_ids.tolist() == [1]
    assert step.batch.positions.tolist() == [63]  # of a model with 64
    assert step.time_ms() > 0
