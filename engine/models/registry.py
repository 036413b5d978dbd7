"""The model registry: reads a model's configuration and refuses architectures that cannot be served."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.causal_lm import kv_shape
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
    if getattr(model_config, "is_encoder_decoder", False):
        raise ModelError(f"{config.path} is {model_type}, an encoder-decoder; only decoder-only models are served")
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


def eos_token_ids(config: ModelConfig, model_config: PreTrainedConfig) -> list[int]:
    """Return the end-of-sequence ids, from the model's generation settings or else its configuration."""
    try:
        eos: Any = GenerationConfig.from_pretrained(model_directory(config)).eos_token_id
    except OSError:
        eos = None
    if eos is None:
        eos = model_config.get_text_config().eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
