"""The loop around a model of one number: what is counted, saved and reported, and how a run continues."""

import pytest
import torch
from rich.console import Console
from torch import nn

from engine.training.loop import MICRO_BATCH_TOKENS, Plan, accumulate_gradients, autocast, make_optimizers, train


class Counting:
    """A task whose batches tell their step, and whose loss falls as the one weight grows to 3."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(()))
        self.steps: list[int] = []
        self.lengths: list[int] = []

    def batch(self, step: int) -> torch.Tensor:
        self.steps.append(step)
        return torch.zeros(2, 5, dtype=torch.int64)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        self.lengths.append(len(rows))
        return (self.weight - 3 - rows.double().mean()) ** 2


class MemoryCheckpointer:
    """Keeps in memory how far a run has come."""

    def __init__(self, task: Counting, step: int) -> None:
        self.model = nn.Module()
        self.model.weight = task.weight
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1)]
        self.optimizers[0].param_groups[0]["peak_lr"] = 0.1
        self.step = step
        self.saved: list[int] = []

    def restore(self) -> int:
        return self.step

    def save(self, step: int) -> None:
        self.saved.append(step)
        self.step = step


def test_a_run_goes_on_after_the_last_checkpoint_learns_reports_and_saves_in_time(console: Console) -> None:
    task, reported = Counting(), []
    checkpointer = MemoryCheckpointer(task, step=4)
    plan = Plan(steps=40, lr_warmup=2, reports=3, checkpoint_every_s=0)
    for _ in range(2):  # a finished run takes no step
        train(task, plan, checkpointer, console, reported.append)
        assert task.steps == list(range(4, 40))
    assert checkpointer.saved == [*range(5, 41), 40, 40]
    assert reported == [10, 20, 30], "at even distances and not at the end"
    assert task.weight.item() > 2  # clipped steps of at most 0.1
    assert task.weight.grad is None


def test_micro_batches_have_the_gradient_and_the_loss_of_the_whole_batch() -> None:
    """Rows that are longer than a micro-batch are taken one by one."""
    for length, lengths in ((MICRO_BATCH_TOKENS // 2, [2, 2, 1]), (2 * MICRO_BATCH_TOKENS, [1] * 5)):
        task = Counting()
        assert accumulate_gradients(task, torch.zeros(5, length + 1, dtype=torch.int64)) == pytest.approx(9.0)
        assert task.lengths == lengths
        assert task.weight.grad is not None
        assert task.weight.grad.item() == pytest.approx(-6.0)


@pytest.mark.parametrize(("has_amx", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_training_computes_in_bfloat16_where_that_is_faster(
    has_amx: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    with autocast(torch.device("cpu")):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype is dtype


def test_the_plateau_does_not_depend_on_where_the_run_ends() -> None:
    assert Plan(300).lr_factor(100) == Plan(1000).lr_factor(100) == 1.0
    assert Plan(300).lr_factor(0) < 0.1
    assert 0 < Plan(300).lr_factor(299) < 0.01


def test_every_parameter_is_trained_by_one_optimizer() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 10))
    owned = [p for optimizer in make_optimizers(model) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
