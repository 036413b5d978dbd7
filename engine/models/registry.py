"""The model registry: reads a model's configuration and refuses architectures that cannot be served."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.causal_lm import kv_shape
from engine.models.encoder_decoder import CONTEXT_LENGTH
from engine.models.family import T5_FAMILY
from engine.models.files import model_directory


def read_config(config: ModelConfig) -> PreTrainedConfig:
    """Read a model's configuration and check that it can be served.

    Raises:
        ModelError: there is no such model, or an architecture that cannot be served.
    """
    directory = model_directory(config)
    try:
        model_config: PreTrainedConfig = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read a model configuration from {config.path}: {error}") from error
    text = model_config.get_text_config()
    model_type = model_config.model_type
    if model_config.is_encoder_decoder:
        return _checked_encoder_decoder(config, model_config)
    layer_types = set(getattr(text, "layer_types", None) or [])
    if "chunked_attention" in layer_types or getattr(text, "attn_temperature_tuning", False):
        raise ModelError(
            f"{config.path} is {model_type}, whose layers attend in chunks or by positions that they count themselves"
        )
    if unsupported := layer_types - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{config.path} is {model_type} with {', '.join(sorted(unsupported))} layers, whose state cannot roll back"
        )
    try:
        kv_shape(model_config, 1)
    except RuntimeError as error:
        raise ModelError(f"{config.path} is {model_type}, whose layers differ in their heads: {error}") from error
    if type(model_config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{config.path} is {model_type}, which has no causal language model in transformers")
    architecture = AutoModelForCausalLM._model_mapping[type(model_config)]
    if not getattr(architecture, "_supports_attention_backend", False):
        raise ModelError(f"{config.path} is {model_type}, whose attention cannot be replaced in transformers")
    return model_config


def _checked_encoder_decoder(config: ModelConfig, model_config: PreTrainedConfig) -> PreTrainedConfig:
    if (model_type := model_config.model_type) not in T5_FAMILY:
        served = ", ".join(T5_FAMILY)
        raise ModelError(f"{config.path} is {model_type}; of encoder-decoders, only {served} are served")
    if decoder_start_id(config, model_config) is None:
        raise ModelError(f"{config.path} is {model_type}, an encoder-decoder, but names no decoder_start_token_id")
    return model_config


def decoder_start_id(config: ModelConfig, model_config: PreTrainedConfig) -> int | None:
    """Return the token that starts an encoder-decoder's text, from its generation settings or its configuration.

    None for a decoder-only model, and if neither names it.
    """
    if not model_config.is_encoder_decoder:
        return None
    settings = _generation_settings(config)
    start: int | None = getattr(settings, "decoder_start_token_id", None)
    return getattr(model_config, "decoder_start_token_id", None) if start is None else start


def context_length(model_config: PreTrainedConfig) -> int:
    """Return how many tokens a request may have, prompt and text together."""
    if model_config.is_encoder_decoder:
        return CONTEXT_LENGTH
    return int(model_config.get_text_config().max_position_embeddings)


def _generation_settings(config: ModelConfig) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(model_directory(config))
    except OSError:
        return None


def eos_token_ids(config: ModelConfig, model_config: PreTrainedConfig) -> list[int]:
    """Return the end-of-sequence ids, from the model's generation settings or else its configuration."""
    eos: Any = getattr(_generation_settings(config), "eos_token_id", None)
    if eos is None:
        eos = model_config.get_text_config().eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
