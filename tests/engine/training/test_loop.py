"""The loop around a model of one number: what is counted, saved and reported, and how a run continues."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from engine.training.loop import MICRO_BATCH_TOKENS, Plan, accumulate_gradients, autocast, make_optimizers, train


class Counting:
    """A task whose batches tell their step, and whose loss falls as the one weight grows to 3."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.steps: list[int] = []

    def batch(self, step: int) -> torch.Tensor:
        self.steps.append(step)
        return torch.zeros(2, 5, dtype=torch.int64)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.weight - 3) ** 2


class MemoryCheckpointer:
    """Keeps in memory how far a run has come."""

    def __init__(self, step: int = 0) -> None:
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.zeros(()))
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1)]
        self.optimizers[0].param_groups[0]["peak_lr"] = 0.1
        self.step = step
        self.saved: list[int] = []

    def restore(self) -> int:
        return self.step

    def save(self, step: int) -> None:
        self.saved.append(step)
        self.step = step


@pytest.fixture
def checkpointer() -> MemoryCheckpointer:
    return MemoryCheckpointer()


def test_a_run_takes_every_step_once_and_learns(checkpointer: MemoryCheckpointer, console: Console) -> None:
    task = Counting(checkpointer.model.weight)
    train(task, Plan(steps=30, lr_warmup=2), checkpointer, console)
    assert task.steps == list(range(30))
    assert checkpointer.saved == [30]
    assert checkpointer.model.weight.item() > 2  # 30 clipped steps of at most 0.1
    assert checkpointer.model.weight.grad is None


def test_a_run_goes_on_after_the_last_checkpoint(console: Console) -> None:
    checkpointer = MemoryCheckpointer(step=4)
    task = Counting(checkpointer.model.weight)
    for _ in range(2):  # a finished run takes no step
        train(task, Plan(steps=6), checkpointer, console)
        assert task.steps == [4, 5]
    assert isinstance(console.file, io.StringIO)
    assert "resuming after step 4" in console.file.getvalue()


def test_reports_come_at_even_distances_and_not_at_the_end(checkpointer: MemoryCheckpointer, console: Console) -> None:
    reported: list[int] = []
    train(Counting(checkpointer.model.weight), Plan(steps=12, reports=3), checkpointer, console, reported.append)
    assert reported == [3, 6, 9]


def test_a_checkpoint_is_saved_when_its_time_has_come(checkpointer: MemoryCheckpointer, console: Console) -> None:
    train(Counting(checkpointer.model.weight), Plan(steps=3, checkpoint_every_s=0), checkpointer, console)
    assert checkpointer.saved == [1, 2, 3, 3]


def test_micro_batches_have_the_gradient_and_the_loss_of_the_whole_batch() -> None:
    class Mean:
        def __init__(self) -> None:
            self.weight = nn.Parameter(torch.ones(()))
            self.lengths: list[int] = []

        def batch(self, step: int) -> torch.Tensor:
            raise NotImplementedError

        def loss(self, rows: torch.Tensor) -> torch.Tensor:
            self.lengths.append(len(rows))
            return self.weight * rows.double().mean()

    task = Mean()
    length = MICRO_BATCH_TOKENS // 2
    batch = torch.arange(5).unsqueeze(1).expand(5, length + 1)
    assert accumulate_gradients(task, batch) == pytest.approx(2.0)
    assert task.lengths == [2, 2, 1]
    assert task.weight.grad is not None
    assert task.weight.grad.item() == pytest.approx(2.0)


def test_rows_longer_than_a_micro_batch_are_taken_one_by_one() -> None:
    weight = nn.Parameter(torch.zeros(()))
    assert accumulate_gradients(Counting(weight), torch.zeros(3, MICRO_BATCH_TOKENS * 2, dtype=torch.int64)) == 9.0


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
