"""Where a model's files are: in its directory, or in the local cache of the Hugging Face hub; nothing is downloaded."""

import json
from pathlib import Path

from engine.config import ModelConfig
from engine.errors import ModelError


def model_directory(config: ModelConfig) -> Path:
    """Return the directory of a model's files.

    Raises:
        ModelError: there is no such directory, and no such model in the local cache.
    """
    if (directory := Path(config.path)).is_dir():
        return directory
    # Imported here, because most models are directories, and the Router imports this file as well.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(config.path, revision=config.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        message = f"model directory {config.path} does not exist, nor does the local hub cache hold such a model"
        raise ModelError(message) from error


def weight_files(config: ModelConfig) -> list[Path]:
    """Return a model's safetensors files.

    Raises:
        ModelError: there is no such model, or one of its files is missing.
    """
    directory = model_directory(config)
    names, index = ["model.safetensors"], directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if missing := [name for name in names if not (directory / name).exists()]:
        raise ModelError(f"cannot load {config.path}: it lacks {', '.join(missing[:3])}")
    return [directory / name for name in names]
