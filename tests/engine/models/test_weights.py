"""Weights are read in the windows that a rank needs, and every missing one is noticed."""

import pytest
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.causal_lm import Shard
from tests.engine.tiny import SIZES, model_of, save


def test_a_file_that_lacks_a_weight_is_refused(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        model_of(tmp_path, Shard(0, 2, lambda x: x))
