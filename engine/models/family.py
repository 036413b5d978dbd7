"""Which models are encoder-decoders, as `config.json` says; read without torch, which the Router does not import."""

import json

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.files import model_directory

T5_FAMILY = ("t5", "mt5", "umt5")
"""The encoder-decoders that are served, by their `model_type`."""


def is_encoder_decoder(config: ModelConfig) -> bool:
    """Return whether a model is an encoder-decoder that can be served.

    Raises:
        ModelError: there is no such model.
    """
    try:
        settings = json.loads((model_directory(config) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read a model configuration from {config.path}: {error}") from error
    return isinstance(settings, dict) and settings.get("model_type") in T5_FAMILY
