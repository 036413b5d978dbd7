import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rich.console import Console

from engine.training import loop
from engine.training.checkpoint import CHECKPOINT, TrainingError
from engine.training.loop import Plan
from engine.training.pretrain import pretrain
from engine.training.small_model import load_model
from tests.engine.training.conftest import OPTIONS

PLAN = Plan(steps=8, lr_warmup=2, checkpoint_every_s=0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


@contextlib.contextmanager
def interrupted_in(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Press Ctrl-C in the middle of a step, whose gradients are then lost."""
    real, count = loop.accumulate_gradients, 0

    def interrupting(task: loop.Task, batch: torch.Tensor) -> float:
        nonlocal count
        count += 1
        if count == step:
            raise KeyboardInterrupt
        return real(task, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate_gradients", interrupting)
        yield


def test_a_run_interrupted_by_ctrl_c_and_resumed_equals_an_uninterrupted_one(
    corpus: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain([corpus], tmp_path / "whole", OPTIONS, PLAN, console)
    with interrupted_in(3, monkeypatch), pytest.raises(KeyboardInterrupt):
        pretrain([corpus], tmp_path / "parts", OPTIONS, PLAN, console)
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert (tmp_path / "parts" / CHECKPOINT).exists()
    pretrain([corpus], tmp_path / "parts", OPTIONS, PLAN, console)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_output_is_an_ordinary_directory_in_bfloat16(target: Path) -> None:
    model, tokenizer = load_model(target)
    assert {tensor.dtype for tensor in weights(target).values()} == {torch.bfloat16}
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template


def test_a_checkpoint_of_other_options_is_refused(corpus: Path, target: Path, console: Console) -> None:
    before = (target / CHECKPOINT).read_bytes()
    with pytest.raises(TrainingError, match="made with another seed"):
        pretrain([corpus], target, replace(OPTIONS, seed=1), PLAN, console)
    assert (target / CHECKPOINT).read_bytes() == before
