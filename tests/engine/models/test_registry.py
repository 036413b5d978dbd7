"""Directories without weights; what is refused of real ones, test_model.py tries."""

import pytest
from transformers import GenerationConfig, LlamaConfig

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.registry import eos_token_ids, read_config
from tests.engine.tiny import SIZES


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
