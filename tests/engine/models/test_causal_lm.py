"""CausalLM: the shape of its KV cache on one device or one of several ranks, and a pass through the module itself."""

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    Qwen3Config,
    T5Config,
)

from engine.models.causal_lm import kv_shape
from engine.models.layers.layer_attention import KVShape
from tests.engine.tiny import GEMMA4, SHARED, SIZES, T5_SIZES


@pytest.mark.parametrize(
    ("config", "world_size", "shape"),
    [
        pytest.param(LlamaConfig(**SIZES), 1, (2, 2, 8, 8), id="grouped heads"),
        pytest.param(LlamaConfig(**SIZES), 2, (2, 1, 8, 8), id="a rank of two"),
        pytest.param(LlamaConfig(**{**SIZES, "num_key_value_heads": None}), 1, (2, 4, 8, 8), id="as many as queries"),
        pytest.param(Qwen3Config(**SIZES, head_dim=16), 1, (2, 2, 16, 16), id="heads of a size of their own"),
        pytest.param(Gemma3Config(text_config={**SIZES, "head_dim": 16}), 1, (2, 2, 16, 16), id="a text model inside"),
        pytest.param(
            DeepseekV3Config(**SIZES, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
            2,
            (2, 1, 24, 0),
            id="latent attention, whole on every rank",
        ),
        pytest.param(T5Config(**T5_SIZES), 1, (3, 4, 12, 12), id="the decoder of two stacks"),
    ],
)
def test_the_cache_has_a_place_for_every_layer_and_key_value_head_of_a_rank(config, world_size, shape):
    assert kv_shape(config, world_size) == KVShape(*shape)


def test_layers_that_share_have_no_place_and_the_others_one_of_their_own_size():
    shape = kv_shape(Gemma4TextConfig(**SIZES | GEMMA4), 1)
    assert shape == KVShape(4, 2, 16, 16, ((2, 16, 16), (1, 32, 32)) * 2)
    assert shape.token_numbers == 4 * 64
    assert kv_shape(Gemma3nTextConfig(**SIZES | SHARED), 1) == KVShape(4, 2, 16, 16)
