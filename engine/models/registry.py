"""The model registry: kinds of models by the `model_type` of their configuration; no torch."""

from collections.abc import Mapping

from engine.config import ModelConfig, ModelInfo
from engine.encoder_decoder.model_kind import KINDS, REFUSED
from engine.models.families import ModelKind
from engine.models.source import ModelSource


class Hybrid(ModelKind):
    """Decoder-only models with linear layers, whose states cannot be cut back like keys and values."""

    draft_refusals: Mapping[str, str] = {
        "trees": "has linear layers, whose states go along a chain; drafting must not be one of trees",
        "run_ahead": "has linear layers, whose states cannot go on from several verdicts; run_ahead must be off",
    }


HYBRIDS = {
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
    *("bailing_hybrid", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2", "lfm2", "lfm2_moe", "lfm3"),
}
"""Families with linear layers that pass the keywords of a pass on to their functions, by `model_type`."""


def open_model(config: ModelConfig) -> ModelSource:
    """Return a model's files, unread; a process opens a model once and hands it on."""
    return ModelSource(config, KINDS | dict.fromkeys(HYBRIDS, Hybrid))


def refused_fields(info: ModelInfo) -> Mapping[str, str]:
    """Return the request fields that a loaded model cannot serve, and why."""
    if info.adapters:
        return {"prompt_logprobs": "prompts' log probabilities are not computed where LoRA adapters are served"}
    return {} if info.start_id is None else REFUSED
