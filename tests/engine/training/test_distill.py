from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rich.console import Console

from engine.training.distill import DistillOptions, distill, divergence
from engine.training.loop import Plan
from engine.training.models import Size
from tests.engine.training.test_pretrain import interrupt_after

OPTIONS = DistillOptions(batch_tokens=128, length=32, continuations=4)
PLAN = Plan(steps=6, lr_warmup=2)
DRAFT = Size.parse("1x32", context=64)


def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(
    corpus: Path, target: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distill([corpus], target, DRAFT, tmp_path / "whole", OPTIONS, PLAN, console)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        assert not distill([corpus], target, DRAFT, tmp_path / "parts", OPTIONS, PLAN, console)
    assert distill([corpus], target, DRAFT, tmp_path / "parts", OPTIONS, PLAN, console)
    whole, parts = (safetensors.torch.load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_draft_directory_is_trained_further_without_continuations(
    corpus: Path, target: Path, tmp_path: Path, console: Console
) -> None:
    options = replace(OPTIONS, continuations=0)
    assert distill([corpus], target, DRAFT, tmp_path / "first", options, PLAN, console)
    assert distill([corpus], target, tmp_path / "first", tmp_path / "second", options, PLAN, console)
    first, second = (safetensors.torch.load_file(tmp_path / run / "model.safetensors") for run in ("first", "second"))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_the_divergence_is_zero_for_equals_and_its_gradient_is_the_difference_of_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    target_logits = torch.randn(3, 5, generator=generator)
    logits = torch.randn(3, 5, generator=generator, requires_grad=True)
    assert divergence(target_logits, target_logits).item() == pytest.approx(0, abs=1e-6)
    torch.autograd.backward(divergence(logits, target_logits))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, (logits.softmax(-1) - target_logits.softmax(-1)).detach() / 3)
