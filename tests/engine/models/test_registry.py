"""Directories without weights; what is refused of real ones, test_model.py tries."""

import pytest
from transformers import BartConfig, GenerationConfig, LlamaConfig, T5Config

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.registry import context_length, decoder_start_id, eos_token_ids, read_config
from tests.engine.tiny import SIZES, T5_SIZES


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere does not exist"):
        read_config(ModelConfig(str(tmp_path / "nowhere")))


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot read a model configuration"):
        read_config(ModelConfig(str(tmp_path)))


def test_every_end_of_text_id_of_the_generation_settings_counts(tmp_path):
    config = ModelConfig(str(tmp_path))
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    assert eos_token_ids(config, read_config(config)) == [1, 7]
    GenerationConfig(do_sample=True).save_pretrained(tmp_path)
    assert eos_token_ids(config, read_config(config)) == [1], "they name no such id, so the configuration's counts"
    (tmp_path / "generation_config.json").unlink()
    assert eos_token_ids(config, read_config(config)) == [1]


def test_the_start_of_an_encoder_decoders_text_is_that_of_its_generation_settings(tmp_path):
    config = ModelConfig(str(tmp_path))
    T5Config(**T5_SIZES).save_pretrained(tmp_path)
    assert decoder_start_id(config, read_config(config)) == 0
    GenerationConfig(decoder_start_token_id=7).save_pretrained(tmp_path)
    assert decoder_start_id(config, read_config(config)) == 7


def test_an_encoder_decoder_of_another_family_or_without_a_start_is_refused(tmp_path):
    config = ModelConfig(str(tmp_path))
    BartConfig(decoder_start_token_id=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="bart; of encoder-decoders, only t5, mt5, umt5 are served"):
        read_config(config)
    T5Config(**{**T5_SIZES, "decoder_start_token_id": None}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="names no decoder_start_token_id"):
        read_config(config)


def test_a_decoder_only_model_has_no_start_and_a_context_of_its_positions(tmp_path):
    config = ModelConfig(str(tmp_path))
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    assert decoder_start_id(config, read_config(config)) is None
    assert context_length(read_config(config)) == 512
    assert context_length(T5Config(**T5_SIZES)) == 2048
