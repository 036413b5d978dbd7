"""The memory plan, case by case: what fits where, before anything is loaded."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.execution.footprint import of_weights
from engine.execution.memory import CacheSize, Footprint, plan_cache

GIB = 2**30
FULL = (131_072 + 4 + 15) // 16
"""Blocks of one request of full length, its draft included."""
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
MODELS = {"8B": (8.03e9, LLAMA_8B), "1B": (1.24e9, LLAMA_1B)}


def worker(name, engine):
    num_weights, sizes = MODELS[name]
    config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=131_072)
    return of_weights(name, int(2 * num_weights), config, engine, longest=131_072, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("free_gib", "models", "settings", "requests"),
    [
        pytest.param(79, ["8B"], {}, 3.49, id="8B alone on 80 GB, 131k"),
        pytest.param(79, ["8B", "1B"], {}, 2.62, id="8B and its 1B draft share 80 GB, 131k"),
        pytest.param(79, ["8B", "1B"], {"memory_fraction": 0.5}, 1.46, id="the same with half of the memory"),
        pytest.param(23, ["8B"], {}, None, id="8B on 24 GB: no request of 131k fits beside it"),
    ],
)
def test_what_fits(free_gib, models, settings, requests):
    engine = EngineConfig(**settings)
    arguments = int(free_gib * GIB), [worker(name, engine) for name in models], engine
    if requests is None:
        with pytest.raises(ModelError, match=r"GiB are free; weights take .* lower max_model_len"):
            plan_cache(*arguments, device="gpu0")
    else:
        assert plan_cache(*arguments, device="gpu0").num_blocks / FULL == pytest.approx(requests, abs=0.06)


def test_a_draft_with_another_context_changes_nothing_of_the_targets():
    engine = EngineConfig(max_num_seqs=1)
    target, draft = worker("1B", engine), replace(worker("1B", engine), max_model_len=512)
    assert plan_cache(79 * GIB, [target, draft], engine, device="gpu0").num_blocks == FULL
    engine = EngineConfig(max_num_seqs=1, max_model_len=4096)
    target, draft = replace(worker("8B", engine), max_model_len=4096), worker("1B", EngineConfig())
    assert plan_cache(23 * GIB, [target, draft], engine, device="gpu0").num_blocks == (4096 + 4 + 15) // 16


@pytest.mark.parametrize(
    ("settings", "device", "num_blocks"),
    [
        pytest.param({}, "cpu", 32 * 17, id="256 tokens for each request, and a draft"),
        pytest.param({"max_num_seqs": 8}, "cpu", (8192 + 4 + 15) // 16, id="one of full length, if that is more"),
        pytest.param({"memory_fraction": 0.5}, "cpu", 32 * 513, id="what is configured"),
        pytest.param({}, "gpu0", 32 * 513, id="on GPUs, what all requests of full length need"),
    ],
)
def test_an_llm_on_a_cpu_leaves_a_notebook_its_memory(settings, device, num_blocks):
    engine = EngineConfig(**settings)
    needs = Footprint("smollm2", 538_000_000, 0, 92_160, 8192)
    cache = plan_cache(64 * GIB, [needs], engine, device=device, is_script=True)
    assert cache.num_blocks == num_blocks
    assert settings or plan_cache(64 * GIB, [needs], engine, device=device).num_blocks == 32 * 513


def test_a_pass_has_no_more_logits_than_tokens():
    many, all_tokens = (worker("1B", EngineConfig(max_num_seqs=count)) for count in (1024 // 5 + 1, 10_000))
    assert many.workspace_bytes == all_tokens.workspace_bytes


def small_cache(free_bytes, state_bytes=0, device="gpu0", **settings):
    engine = EngineConfig(num_speculative_tokens=0, **{"max_num_seqs": 4, "memory_fraction": 1.0} | settings)
    return plan_cache(100 + free_bytes, [Footprint("model", 100, 0, 1, 64, state_bytes)], engine, device=device)


def test_one_request_of_full_length_is_enough_and_a_part_of_the_memory_is_left_to_others():
    assert small_cache(80).num_blocks == 5
    assert small_cache(64).num_blocks == 4
    with pytest.raises(ModelError, match="are free"):
        small_cache(63)
    many = {"max_num_seqs": 10**6, "memory_fraction": None}
    assert [small_cache(16_000, device=name, **many).num_blocks for name in ("cpu", "gpu0")] == [500, 900]


def test_states_get_half_of_the_memory_at_most_and_blocks_the_rest():
    """Two slots for each of four requests and four more; blocks never take more than the requests need."""
    assert small_cache(10_000, 10) == CacheSize(4 * 4, 12)
    assert small_cache(130, 10) == CacheSize((130 - 6 * 10) // 16, 6)
    assert small_cache(160, 10, num_states=2) == CacheSize((160 - 20) // 16, 2)
    assert small_cache(0, 10, num_blocks=7) == CacheSize(7, 12)
    assert small_cache(10 * GIB, GIB).num_states == 5
    with pytest.raises(ModelError, match=r"blocks and 4 state slots of 1.0 GiB .* max_num_seqs 4 needs 5 slots; lower"):
        small_cache(10 * GIB - 1, GIB)
    with pytest.raises(ModelError, match=r"2 state slots of 50.0 GiB, but one request of 64 tokens needs .* max_num"):
        small_cache(100 * GIB + 63, 50 * GIB, num_states=2)
