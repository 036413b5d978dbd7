"""The kind of a model stands in its config.json, which is read without torch."""

import json

import pytest

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.family import is_encoder_decoder


@pytest.mark.parametrize(("model_type", "expected"), [("t5", True), ("umt5", True), ("bart", False), ("llama", False)])
def test_an_encoder_decoder_is_told_by_its_type(model_type, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert is_encoder_decoder(ModelConfig(str(tmp_path))) is expected


def test_a_directory_without_a_configuration_is_named(tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ModelError, match=r"cannot read a model configuration from .*nothing"):
        is_encoder_decoder(ModelConfig(str(tmp_path / "nothing")))
