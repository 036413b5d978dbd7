"""The model registry: the kinds of models that are served, by the `model_type` of their configuration."""

from collections.abc import Mapping

from engine.config import ModelConfig, ModelInfo
from engine.models import encoder_decoder, kinds
from engine.models.encoder_decoder import REFUSED
from engine.models.source import ModelSource


def open_model(config: ModelConfig) -> ModelSource:
    """Return a model's files; nothing is read yet. A process opens a model once and hands it on."""
    return ModelSource(config, {**encoder_decoder.KINDS, **kinds.KINDS})


def refused_fields(info: ModelInfo) -> Mapping[str, str]:
    """Return the request fields that a loaded model cannot serve, and why."""
    return {} if info.start_id is None else REFUSED
