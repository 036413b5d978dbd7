"""What cannot be combined with an encoder-decoder is refused by what stands in config.json."""

import json
from dataclasses import replace

import pytest

from engine.config import ModelConfig
from engine.drafting.registry import METHODS
from engine.errors import ModelError, ModelMismatchError
from engine.models.family import check_family, is_encoder_decoder


@pytest.fixture
def model(tmp_path):
    """Makes the directory of a model of some type."""

    def make(name, model_type):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
        return ModelConfig(str(tmp_path / name))

    return make


def test_a_pair_has_an_encoder_or_has_none(model):
    t5, small, llama = model("t5", "t5"), model("small", "mt5"), model("llama", "llama")
    method = METHODS["model"]
    assert check_family(t5, small, method)
    assert check_family(t5, None, METHODS["suffix"])
    assert not check_family(llama, llama, method)
    with pytest.raises(ModelMismatchError, match=r"/t5 is an encoder-decoder, the draft .*/llama is decoder-only"):
        check_family(t5, llama, method)
    with pytest.raises(ModelMismatchError, match=r"/llama is decoder-only, the draft .*/t5 is an encoder-decoder"):
        check_family(llama, t5, method)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (METHODS["tree"], "verifies no trees"),
        (replace(METHODS["model"], runs_in="target"), "cannot draft for itself"),
    ],
)
def test_a_method_that_does_not_fit_an_encoder_decoder_is_refused(method, message, model):
    t5 = model("t5", "t5")
    with pytest.raises(ModelError, match=message):
        check_family(t5, t5, method)
    llama = model("llama", "llama")
    assert not check_family(llama, llama, method)


def test_a_directory_without_a_configuration_is_named(tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ModelError, match=r"cannot read a model configuration from .*nothing"):
        is_encoder_decoder(ModelConfig(str(tmp_path / "nothing")))
