"""Directories without weights, and the kind of the model in each; test_loader.py tries which are refused."""

import pytest
from transformers import BartConfig, GenerationConfig, LlamaConfig, T5Config

from engine.config import ModelConfig
from engine.encoder_decoder.model_kind import EncoderDecoder
from engine.errors import ModelError
from engine.models.registry import open_model
from tests.engine.tiny import SIZES, T5_SIZES


def source_of(config, path, **settings):
    config.save_pretrained(path)
    return open_model(ModelConfig(str(path), **settings))


def start_id(source):
    return source.kind.start_id(source.settings, source.generation_settings)


def test_the_start_of_an_encoder_decoders_text_is_that_of_its_generation_settings(tmp_path):
    source = source_of(T5Config(**T5_SIZES), tmp_path)
    assert isinstance(source.kind, EncoderDecoder)
    assert start_id(source) == 0
    GenerationConfig(decoder_start_token_id=7).save_pretrained(tmp_path)
    assert start_id(open_model(source.config)) == 7
    assert source.kind.context_length(source.configuration) == 2048


def test_an_encoder_decoder_of_another_family_or_without_a_start_or_quantised_is_refused(tmp_path):
    with pytest.raises(ModelError, match="bart, an encoder-decoder of a family that is not served"):
        _ = source_of(BartConfig(decoder_start_token_id=2), tmp_path / "bart").configuration
    with pytest.raises(ModelError, match="names no decoder_start_token_id"):
        _ = source_of(T5Config(**{**T5_SIZES, "decoder_start_token_id": None}), tmp_path / "t5").configuration
    with pytest.raises(ModelError, match="not served quantised"):
        _ = source_of(T5Config(**T5_SIZES), tmp_path / "int8", quantization="int8").configuration


def test_a_decoder_only_model_has_no_start_and_a_context_of_its_positions(tmp_path):
    source = source_of(LlamaConfig(**SIZES), tmp_path)
    assert start_id(source) is None
    assert source.kind.context_length(source.configuration) == 512
