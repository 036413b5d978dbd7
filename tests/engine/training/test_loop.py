"""Gradients of micro-batches, rates and optimizers; how a run continues, test_pretrain shows."""

import pytest
import torch
from torch import nn

from engine.training.loop import MICRO_BATCH_TOKENS, Plan, accumulate_gradients, make_optimizers


class Counting:
    """A task whose loss falls as its weight grows to 3, and that notes the lengths of its batches."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(()))
        self.lengths: list[int] = []

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        self.lengths.append(len(rows))
        return (self.weight - 3 - rows.double().mean()) ** 2


def test_micro_batches_have_the_gradient_and_the_loss_of_the_whole_batch() -> None:
    """Rows that are longer than a micro-batch are taken one by one."""
    for length, lengths in ((MICRO_BATCH_TOKENS // 2, [2, 2, 1]), (2 * MICRO_BATCH_TOKENS, [1] * 5)):
        task = Counting()
        assert accumulate_gradients(task, torch.zeros(5, length + 1, dtype=torch.int64)) == pytest.approx(9.0)
        assert task.lengths == lengths
        assert task.weight.grad is not None
        assert task.weight.grad.item() == pytest.approx(-6.0)


def test_the_plateau_does_not_depend_on_where_the_run_ends() -> None:
    assert Plan(300).lr_factor(100) == Plan(1000).lr_factor(100) == 1.0
    assert Plan(300).lr_factor(0) < 0.1
    assert 0 < Plan(300).lr_factor(299) < 0.01


def test_every_parameter_is_trained_by_one_optimizer() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 10))
    owned = [p for optimizer in make_optimizers(model) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
