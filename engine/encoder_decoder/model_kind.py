"""Which models are encoder-decoders, and their limits; the Router imports this, so no torch here."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.families import ModelKind

if TYPE_CHECKING:
    from engine.models.causal_lm import CausalLM

REFUSED: Mapping[str, str] = {
    "trees": "which cannot verify trees: its attention depends on distances",
    "heads": "which no trained head reads",
    "self-drafts": "which cannot draft for itself",
    "tokenizers": "whose draft must have the same tokenizer",
    "run_ahead": "whose draft cannot run ahead; run_ahead must be off",
    "messages": "this model is an encoder-decoder, which takes no conversations; use /v1/completions",
    "echo": "this model is an encoder-decoder, whose text does not continue the prompt, so it cannot echo it",
    "prompt_logprobs": "this model encodes its prompt and predicts none of it, so there are no prompt_logprobs",
}
"""Why features and request fields are refused."""
CONTEXT_LENGTH = 2048
"""Tokens of prompt and text together; the models set no limit, because their positions are relative."""


class EncoderDecoder(ModelKind):
    """Models of the T5 family."""

    name = "an encoder-decoder"
    refusals = REFUSED

    def check(self, config: ModelConfig, configuration: Any, generation_settings: Mapping[str, Any]) -> None:
        if not configuration.is_encoder_decoder:
            raise ModelError(f"{config.path} is {configuration.model_type}, of which {self.name} is only a part")
        if self.start_id(configuration.to_dict(), generation_settings) is None:
            raise ModelError(f"{config.path} is {self.name}, but names no decoder_start_token_id")
        if config.quantization != "none" or getattr(configuration, "quantization_config", None) is not None:
            raise ModelError(f"{config.path} is {self.name}, whose weights are not served quantised")

    def context_length(self, configuration: Any) -> int:
        return CONTEXT_LENGTH

    def start_id(self, settings: Mapping[str, Any], generation_settings: Mapping[str, Any]) -> int | None:
        start: int | None = generation_settings.get("decoder_start_token_id")
        return settings.get("decoder_start_token_id") if start is None else start

    @property
    def model_class(self) -> "type[CausalLM]":
        from engine.encoder_decoder.t5 import EncoderDecoderLM

        return EncoderDecoderLM


KINDS = dict.fromkeys(("t5", "mt5", "umt5"), EncoderDecoder)
"""The encoder-decoders that are served, by their `model_type`."""
