import pytest
import torch
from torch import nn

from engine.training.optimizer import lr_factor, make_optimizers, orthogonalize


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 16), (2, 16, 4)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices, steps=10))
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_the_plateau_does_not_depend_on_where_the_run_ends() -> None:
    assert lr_factor(100, steps=300) == lr_factor(100, steps=1000) == 1.0
    assert lr_factor(0, steps=300) < 0.1
    assert 0 < lr_factor(299, steps=300) < 0.01


def test_every_parameter_is_trained_by_one_optimizer_and_the_loss_falls() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 10))
    optimizers = make_optimizers(model)
    owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    x = torch.arange(10)
    losses = []
    for _ in range(100):
        loss = nn.functional.cross_entropy(model(x), x)
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
