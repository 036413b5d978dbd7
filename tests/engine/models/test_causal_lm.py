"""The contract with transformers: every family's paged logits are those of its own eager forward."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.execution.attention import KVTensors
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu import packages as compilation
from engine.execution.cpu.half_weights import PanelLinear
from engine.execution.registry import load_backend, resolve_device, resolve_dtype
from tests.engine.tiny import SIZES, save

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HEADS = {"head_dim": 16}
FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, long rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, half sliding": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral, sliding": ("MistralConfig", {"sliding_window": 8}),
    "gemma": ("GemmaConfig", HEADS),
    "gemma3, half sliding": (
        "Gemma3TextConfig",
        {**HEADS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3 mixture": ("Qwen3MoeConfig", {**MIXTURE, **HEADS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0}),
}


def family(name):
    cls, extra = FAMILIES[name]
    return getattr(transformers, cls)(**{**SIZES, **extra})


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def load(path):
    return load_backend(ModelConfig(str(path), dtype="float32", device="cpu"))


def reference(path):
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    def logits(token_ids):
        with torch.no_grad():
            return module(torch.tensor([token_ids])).logits[0]

    return logits


def paths_of(tokens, parents):
    found = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*found[parent + 1], token])
    return found[1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_batch_of_every_kind_of_row_computes_transformers_own_logits(name, tmp_path):
    """Prompts, chunks, single tokens, chains and trees, in blocks that are dirty and out of order."""
    config = family(name)
    save(config, tmp_path, factor=3.0)
    expect, model = reference(tmp_path), load(tmp_path)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(2, 64, (6, 48), generator=generator).tolist()
    order = (torch.randperm(6 * 8, generator=generator) + 1).view(6, 8).tolist()
    kv = model.allocate_kv(49, 8)
    for cache in (*kv.keys, *kv.values):
        cache.normal_(std=30.0, generator=generator)
    done = [17, 33, 12, 25]
    model.run(build([ForwardRow(text[i][:n], 0, order[i], 0) for i, n in enumerate(done)], kv))
    tree = [-1, 0, -1, 2, 2, 4]
    drafted = text[3][40:46]
    rows = [
        ForwardRow(text[0][17:40], 17, order[0], 23),
        ForwardRow(text[1][33:34], 33, order[1], 1),
        ForwardRow(text[2][12:16], 12, order[2], 4),
        ForwardRow([*text[3][25:27], *drafted], 25, order[3], 8, parents=tree),
        ForwardRow(text[4][:5], 0, order[4], 5),
        ForwardRow(text[5][:20], 0, order[5], 2),
    ]
    logits = model.run(build(rows, kv)).logits
    wanted = [
        expect(text[0][:40])[17:],
        expect(text[1][:34])[33:],
        expect(text[2][:16])[12:],
        expect(text[3][:27])[25:],
        *(expect([*text[3][:27], *path])[-1:] for path in paths_of(drafted, tree)),
        expect(text[4][:5]),
        expect(text[5][:20])[18:],
    ]
    assert logits.dtype == torch.float32
    assert (logits - torch.cat(wanted)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral, sliding", "gemma3, half sliding"])
def test_a_prompt_in_chunks_computes_what_it_computes_whole(name, tmp_path):
    save(family(name), tmp_path, factor=3.0)
    expect, model = reference(tmp_path), load(tmp_path)
    text = torch.randint(2, 64, (45,), generator=torch.Generator().manual_seed(4)).tolist()
    kv, blocks = model.allocate_kv(8, 8), [4, 7, 1, 2, 6, 3]
    found, start = [], 0
    for size in (3, 17, 1, 20, 4):
        row = ForwardRow(text[start : start + size], start, blocks, size)
        found.append(model.run(build([row], kv)).logits)
        start += size
    assert (torch.cat(found) - expect(text)).abs().max() < 1e-4


def test_an_accepted_path_of_a_tree_counts_as_context_after_it_was_moved(target):
    """The keys of a node carry the rotary position of its depth, so moving them is all there is to do."""
    kv, blocks = target.allocate_kv(8, 4), [5, 2, 7]
    prompt, drafted, parents = [9, 4, 30, 7, 8], [11, 12, 13, 14], [-1, -1, 1, 2]
    target.run(build([ForwardRow([*prompt, *drafted], 0, blocks, 0, parents=parents)], kv))
    slots = torch.tensor([blocks[place // 4] * 4 + place % 4 for place in range(5, 9)])
    kv.move(slots[[1, 2, 3]], slots[[0, 1, 2]])
    moved = target.run(build([ForwardRow([40], 8, blocks, 1)], kv)).logits
    straight = target.allocate_kv(8, 4)
    whole = target.run(build([ForwardRow([*prompt, 12, 13, 14, 40], 0, blocks, 1)], straight)).logits
    assert (moved - whole).abs().max() < 1e-5


REFUSED = {
    "an encoder-decoder": ("T5Config", {}, "encoder-decoder"),
    "a recurrent model": ("MambaConfig", {}, "cannot roll back"),
    "a hybrid": ("Qwen3NextConfig", HEADS, "cannot roll back"),
    "capped attention": ("Gemma2Config", HEADS, "softcap"),
    "attention sinks": ("GptOssConfig", {"num_local_experts": 4, **HEADS}, "s_aux"),
    "chunked attention": ("Llama4TextConfig", HEADS, "cannot roll back"),
    "biased attention": ("BloomConfig", {"n_head": 4}, "attention cannot be replaced"),
}
NOT_LIKE_LLAMA = {
    "no .model": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "other key shapes": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "keywords not passed on": ("NemotronConfig", {}),
}


def save_or_describe(cls, extra, path):
    """Write a model, or its configuration only where the family is not a causal language model."""
    config = getattr(transformers, cls)(**{**SIZES, **extra})
    if cls == "T5Config":
        config.save_pretrained(path)
    else:
        save(config, path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_exactly_is_refused_while_loading(name, tmp_path):
    cls, extra, reason = REFUSED[name]
    save_or_describe(cls, extra, tmp_path)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("name", NOT_LIKE_LLAMA)
def test_what_is_built_unlike_llama_is_refused_while_loading(name, tmp_path):
    cls, extra = NOT_LIKE_LLAMA[name]
    save_or_describe(cls, extra, tmp_path)
    with pytest.raises(ModelError):
        load(tmp_path)


def test_weights_that_are_pickles_are_refused(tmp_path):
    save(family("llama"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load"):
        load(tmp_path)


def test_the_cache_has_the_models_heads(target):
    kv = target.allocate_kv(5, 16)
    assert isinstance(kv, KVTensors)
    assert [tuple(keys.shape) for keys in kv.keys] == [(5, 16, 2, 8)] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ModelError, match="no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"


def test_a_dtype_that_was_asked_for_is_taken():
    cpu = torch.device("cpu")
    assert resolve_dtype("float16", cpu) is torch.float16


@pytest.mark.parametrize(("has_amx", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_serves_in_bfloat16_where_it_multiplies_that_faster(has_amx, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert resolve_dtype("auto", torch.device("cpu")) is dtype


@pytest.fixture(params=["a library", "a broken library", "no compiler"])
def has_library(request, monkeypatch):
    """Whether this machine has the library that multiplies rows by 16-bit weights."""
    if "library" in request.param and not compilation.has_compiler():
        pytest.skip("there is no C++ compiler")
    if request.param == "a broken library":
        monkeypatch.setattr(compilation, "kernels_path", lambda: Path(__file__))
    elif request.param == "no compiler":
        monkeypatch.setattr(compilation, "has_compiler", lambda: False)
    return request.param == "a library"


def test_16_bit_weights_stay_16_bit_in_eager_passes_where_the_library_is(has_library, tmp_path, monkeypatch):
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    save(config, tmp_path, factor=3.0)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    module.save_pretrained(tmp_path)
    monkeypatch.setattr("engine.execution.cpu.half_weights.MIN_LARGE", 64 * 32)
    model, expect = load(tmp_path), reference(tmp_path)
    layers = [layer for layer in model.model.module.modules() if isinstance(layer, nn.Linear | PanelLinear)]
    assert {type(layer) for layer in layers} == {PanelLinear if has_library else nn.Linear}
    assert model.info.num_parameters == module.num_parameters()
    text = list(range(2, 40))
    kv = model.allocate_kv(4, 16)
    assert model.run(build([ForwardRow(text[:20], 0, [1, 2, 3], 0)], kv)).logits.shape == (0, 64)
    logits = model.run(build([ForwardRow(text[20:], 20, [1, 2, 3], len(text) - 20)], kv)).logits
    assert (logits - expect(text)[20:]).abs().max() < 1e-4


def test_a_model_without_large_layers_does_not_wait_for_the_library(tmp_path, monkeypatch):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    monkeypatch.setattr(compilation, "load_kernels", pytest.fail)
    load(tmp_path)
