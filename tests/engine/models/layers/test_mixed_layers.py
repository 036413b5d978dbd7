"""Layers of different kinds: their texts are those of transformers, drafted, cached, preempted or not."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from engine import LLM, SamplingParams
from engine.models.layers.mixed_layers import describe_layers, why_mixed
from tests.engine.models.layers.test_quantization import greedy, reference, write
from tests.engine.tiny import EXPERTS, GEMMA4, HEADS, LLAMA4, MISTRAL3, SIZES, architectures_of, backend_of, save

MODELS = {
    "gemma 4": lambda: transformers.Gemma4TextConfig(**SIZES | GEMMA4),
    "llama 4": lambda: transformers.Llama4TextConfig(**SIZES | LLAMA4),
    "mistral 3": lambda: transformers.Mistral3Config(**MISTRAL3, tie_word_embeddings=False),
}
METHODS = {
    "none": {"drafting": "none"},
    "copies of 1": {"drafting": "suffix", "num_speculative_tokens": 1},
    "copies of 4": {"drafting": "suffix", "num_speculative_tokens": 4},
    "copies of 8, preempted": {"drafting": "suffix", "num_speculative_tokens": 8, "num_blocks": 8},
    "its first layers": {"drafting": "self", "self_draft_layers": 3, "num_speculative_tokens": 4},
    "trees": {"drafting": "tree", "num_speculative_tokens": 8, "max_num_batched_tokens": 40},
}
PROMPTS = [[2, 3, 4, 5, 6, 7] * 4, [9, 30, 11] * 3, [2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 40, 41]]
LENGTH = 28


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of each model, and the texts that transformers generates."""
    made = {}
    for name, config in MODELS.items():
        path = save(config(), tmp_path_factory.mktemp("model"), factor=4.0)
        vocabulary = {f"t{i}": i for i in range(SIZES["vocab_size"])}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
        loaded = architectures_of(config()).from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        module = loaded.eval()
        settings = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        texts = [module.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in PROMPTS]
        assert len({token for text in texts for token in text}) > 6, "the model repeats one token"
        made[name] = path, texts
    return made


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_that_of_transformers_generate(name, method, models):
    path, texts = models[name]
    draft = path if method == "trees" else "none"
    settings = {"dtype": "float32", "device": "cpu", "compile": "off", "speculation": "fixed"}
    llm = LLM(path, draft, **settings | {"num_blocks": 64} | METHODS[method])
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    for prompts in (PROMPTS, PROMPTS):  # the second time from the cache
        assert [result.outputs[0].token_ids for result in llm.generate(prompts, params)] == texts
    assert (llm.stats.num_accepted_tokens > 0) is (method != "none")
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
