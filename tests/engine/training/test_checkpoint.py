import errno
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.training.checkpoint import CHECKPOINT, Checkpointer, TrainingError, write_whole


def make(folder: Path, seed: int = 0) -> Checkpointer:
    model = nn.Linear(2, 2)
    return Checkpointer(folder, {"seed": seed}, model, [torch.optim.AdamW(model.parameters())])


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = make(tmp_path)
    checkpointer.save(7)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TrainingError, match="No space left on device; the previous one is kept"):
        checkpointer.save(8)
    assert make(tmp_path).restore() == 7
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
    checkpointer.path.write_bytes(b"not a checkpoint")
    with pytest.raises(TrainingError, match="cannot read checkpoint"):
        checkpointer.restore()
    with pytest.raises(TrainingError, match="cannot write"):
        write_whole(checkpointer.path / "x", b"")
