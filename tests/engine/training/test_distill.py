from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from engine.training.distill import DistillOptions, distill, divergence
from engine.training.loop import Plan
from engine.training.small_model import Size
from tests.engine.training.test_pretrain import weights

OPTIONS = DistillOptions(batch_tokens=128, length=32, continuations=4)
PLAN = Plan(steps=6, lr_warmup=2, checkpoint_every_s=0)
DRAFT = Size.parse("1x32", context=64)


def test_a_draft_directory_is_trained_further_without_continuations(
    corpus: Path, target: Path, tmp_path: Path, console: Console
) -> None:
    options = replace(OPTIONS, continuations=0)
    distill([corpus], target, DRAFT, tmp_path / "first", options, PLAN, console)
    distill([corpus], target, tmp_path / "first", tmp_path / "second", options, PLAN, console)
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_the_divergence_is_zero_for_equals_and_its_gradient_is_the_difference_of_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    target_logits = torch.randn(3, 5, generator=generator)
    logits = torch.randn(3, 5, generator=generator, requires_grad=True)
    assert divergence(target_logits, target_logits).item() == pytest.approx(0, abs=1e-6)
    torch.autograd.backward(divergence(logits, target_logits))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, (logits.softmax(-1) - target_logits.softmax(-1)).detach() / 3)
