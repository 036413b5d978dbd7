"""Layers of different kinds: their texts are those of transformers, drafted, cached, preempted or not."""

import pytest
import torch
import transformers

from engine import SamplingParams
from engine.models.layers.mixed_layers import describe_layers, why_mixed
from tests.engine.models.layers.test_quantization import greedy, reference, write
from tests.engine.test_zoo import expected, make_llm, outputs, save_family
from tests.engine.tiny import EXPERTS, GEMMA4, HEADS, LLAMA4, SIZES, backend_of, save

METHODS = {
    "copies, preempted": {"drafting": "suffix", "num_blocks": 8},
    "its first layers": {"drafting": "self", "self_draft_layers": 3},
    "trees": {"drafting": "tree", "num_speculative_tokens": 8, "max_num_batched_tokens": 40},
}
PROMPTS = [[2, 3, 4, 5, 6, 7] * 4, [9, 30, 11] * 3, [2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 40, 41]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=["gemma4_text", "llama4_text"])
def model(request, tmp_path_factory):
    """A folder, and the texts that transformers generates."""
    path = tmp_path_factory.mktemp("model")
    save_family(request.param, path)
    return path, expected(path, PROMPTS, PARAMS.max_tokens)[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_of_transformers_generate(method, model):
    path, texts = model
    llm = make_llm(path, draft=path if method == "trees" else "none", **METHODS[method])
    for prompts in (PROMPTS, PROMPTS):  # the second time from the cache
        assert outputs(llm, prompts, PARAMS)[0] == texts
    assert llm.stats.num_accepted_tokens > 0
    assert (llm.stats.num_preemptions > 0) is ("preempted" in method)
    assert llm.stats.num_cached_prompt_tokens > 0


@pytest.mark.parametrize("config", ["PhimoeConfig", "Qwen2MoeConfig"])
def test_windows_that_transformers_has_in_its_masks_only_are_kept(config, tmp_path):
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}
    path = save(getattr(transformers, config)(**SIZES | EXPERTS | window), tmp_path, factor=8.0)
    assert len(set(text := greedy(reference(path)))) > 5
    assert write(backend_of(path)) == text


def test_models_of_one_kind_are_left_as_they_are_and_compiled():
    config = transformers.LlamaConfig(**SIZES)
    attention = torch.nn.Module()
    attention.layer_idx = 0
    before = dict(vars(attention))
    describe_layers(attention, config)
    assert vars(attention) == before
    assert why_mixed(config) is None
    assert why_mixed(transformers.Gemma3TextConfig(**SIZES | HEADS)) is None
    one_size = GEMMA4 | {"global_head_dim": 16, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
    assert why_mixed(transformers.Gemma4TextConfig(**SIZES | one_size)) is None
    assert "keys and values" in why_mixed(transformers.Gemma4TextConfig(**SIZES | GEMMA4))
    assert "chunks" in why_mixed(transformers.Llama4TextConfig(**SIZES | LLAMA4))
