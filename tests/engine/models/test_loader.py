"""The loader: what a loaded model is and is known by, and what is refused before a backend tries it."""

import logging

import pytest
import torch
import transformers

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.execution.attention import ATTENTION_NAME
from engine.models.causal_lm import Shard
from engine.models.fusion import FusedLinear
from engine.models.loader import load_model
from tests.engine.tiny import HEADS, SIZES, save

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def load(path, dtype=torch.float32, shard=None, **settings):
    return load_model(ModelConfig(str(path), **settings), device=CPU, dtype=dtype, shard=shard)


def test_a_loaded_model_is_frozen_fused_and_attends_with_our_function(target_path):
    model = load(target_path)
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert model.module.config._attn_implementation == ATTENTION_NAME
    assert sum(isinstance(layer, FusedLinear) for layer in model.module.modules()) == 2 * 2
    assert (model.device, model.dtype, model.shard) == (CPU, torch.float32, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_known_of_a_model_comes_from_its_files(dtype, tmp_path):
    config = transformers.LlamaConfig(**SIZES)
    save(config, tmp_path)
    transformers.GenerationConfig(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    info = load(tmp_path, dtype).info
    assert (info.name, info.vocab_size, info.max_model_len) == (str(tmp_path), 64, 512)
    assert info.eos_token_ids == [1, 7]
    assert info.num_parameters == transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert (info.dtype, info.device) == (str(dtype).removeprefix("torch."), "cpu")


def test_weights_are_converted_to_the_number_format(target_path):
    model = load(target_path, torch.bfloat16)
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}


def test_a_rank_loads_its_own_slices_and_a_single_rank_the_whole_model(target_path):
    whole = load(target_path).info.num_parameters
    assert load(target_path, shard=Shard(0, 1, lambda x: x)).info.num_parameters == whole
    shard = Shard(1, 2, lambda x: x)
    rank = load(target_path, shard=shard)
    assert rank.shard is shard
    assert rank.info.num_parameters < whole


UNSERVED = {
    "an encoder-decoder": ("T5Config", {}, "encoder-decoder"),
    "a recurrent model": ("MambaConfig", {}, "cannot roll back"),
    "a hybrid": ("Qwen3NextConfig", HEADS, "cannot roll back"),
    "chunked attention": ("Llama4TextConfig", HEADS, "attend in chunks"),
    "heads that differ by layer": ("Gemma4TextConfig", HEADS, "differ in their heads"),
    "biased attention": ("BloomConfig", {"n_head": 4}, "attention cannot be replaced"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_an_architecture_that_cannot_be_served_exactly_is_refused_by_its_configuration(name, tmp_path):
    cls, extra, reason = UNSERVED[name]
    getattr(transformers, cls)(**{**SIZES, **extra}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "nowhere")


def test_weights_that_are_pickles_are_refused(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load"):
        load(tmp_path)
