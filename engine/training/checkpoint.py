"""Writes checkpoints and model directories; a kill, a full disk or Ctrl-C leaves the last good files."""

import contextlib
import io
import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.errors import PacelineError

CHECKPOINT = "checkpoint.pt"


class TrainingError(PacelineError):
    """The command cannot be carried out; the last checkpoint is unchanged."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash, `path` holds the old bytes or the new bytes."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        kept = "; the previous one is kept" if path.exists() else ""
        raise TrainingError(f"cannot write {path}: {error.strerror or error}{kept}") from error


@dataclass(frozen=True)
class Checkpointer:
    """Saves and restores a run's weights, optimizers and step; refuses checkpoints of runs with other `settings`."""

    folder: Path
    settings: dict[str, Any]
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    @property
    def path(self) -> Path:
        return self.folder / CHECKPOINT

    def save(self, step: int) -> None:
        state = {
            "step": step,
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(self.path, buffer.getbuffer().tobytes())

    def restore(self) -> int:
        """Load the checkpoint, if it exists, and return its number of steps, or else 0."""
        if not self.path.exists():
            return 0
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise TrainingError(f"cannot read checkpoint {self.path}: {error}") from error
        if changed := [name for name, value in self.settings.items() if state["settings"].get(name) != value]:
            raise TrainingError(
                f"{self.path} was made with another {', '.join(changed)}; use the same options or another --output"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return int(state["step"])


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model in bfloat16: complete in a temporary folder first, then moved to `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            nn.Module.to(model, torch.bfloat16)
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            for file in sorted(Path(partial).iterdir()):
                file.replace(folder / file.name)
    except OSError as error:
        raise TrainingError(f"cannot write {folder}: {error.strerror or error}") from error
