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


def llama(hidden, intermediate, layers, heads, kv_heads):
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=128_256,
        max_position_embeddings=131_072,
    )


MODELS = {
    "1B": (1.24e9, llama(2048, 8192, 16, 32, 8)),
    "8B": (8.03e9, llama(4096, 14_336, 32, 32, 8)),
    "70B": (70.6e9, llama(8192, 28_672, 80, 64, 8)),
}


def worker(name, engine, *, ranks=1):
    num_weights, config = MODELS[name]
    # Embeddings and head are whole on each rank.
    whole = 2 * config.vocab_size * config.hidden_size if ranks > 1 else 0
    weight_bytes = int(2 * ((num_weights - whole) / ranks + whole))
    return of_weights(name, weight_bytes, config, engine, longest=131_072, dtype=torch.bfloat16, world_size=ranks)


def blocks(free_gib, models, *, ranks=1, **settings):
    engine = EngineConfig(**settings)
    workers = [worker(name, engine, ranks=ranks) for name in models]
    return plan_cache(int(free_gib * GIB), workers, engine, device="gpu0").num_blocks


FULL = (131_072 + 4 + 15) // 16
"""Blocks of one request of full length, its draft included."""


@pytest.mark.parametrize(
    ("free_gib", "models", "settings", "requests"),
    [
        pytest.param(79, ["8B"], {}, 3.49, id="8B alone on 80 GB, 131k"),
        pytest.param(79, ["8B", "1B"], {}, 2.62, id="8B and its 1B draft share 80 GB, 131k"),
        pytest.param(79, ["8B", "1B"], {"memory_fraction": 0.5}, 1.46, id="the same with half of the memory"),
        pytest.param(79, ["70B"], {"ranks": 4}, 3.76, id="a rank of 70B over four"),
        pytest.param(15.5, ["1B"], {}, 2.65, id="the draft on a card of 16 GB"),
    ],
)
def test_what_fits(free_gib, models, settings, requests):
    assert blocks(free_gib, models, **settings) / FULL == pytest.approx(requests, abs=0.06)


@pytest.mark.parametrize(
    ("free_gib", "models", "settings"),
    [
        pytest.param(15.5, ["8B"], {}, id="8B on 16 GB: the weights alone do not fit"),
        pytest.param(23, ["8B"], {}, id="8B on 24 GB: no request of 131k fits beside them"),
        pytest.param(79, ["70B"], {"ranks": 2}, id="70B over two"),
    ],
)
def test_what_does_not_fit_is_refused_with_figures(free_gib, models, settings):
    with pytest.raises(ModelError, match=r"GiB are free; weights take .* lower max_model_len"):
        blocks(free_gib, models, **settings)


def test_nobody_gets_more_than_all_requests_of_full_length_need():
    assert blocks(1000, ["1B"], max_model_len=1024, max_num_seqs=2) == 2 * ((1024 + 4 + 15) // 16)


def test_a_draft_with_a_short_context_leaves_the_target_room_for_its_own():
    engine = EngineConfig(max_num_seqs=1)
    target, draft = worker("1B", engine), replace(worker("1B", engine), max_model_len=512)
    assert plan_cache(79 * GIB, [target, draft], engine, device="gpu0").num_blocks == FULL


def test_a_draft_with_a_long_context_asks_for_no_more_than_the_targets():
    engine = EngineConfig(max_num_seqs=1, max_model_len=4096)
    target, draft = replace(worker("8B", engine), max_model_len=4096), worker("1B", EngineConfig())
    assert plan_cache(23 * GIB, [target, draft], engine, device="gpu0").num_blocks == (4096 + 4 + 15) // 16


@pytest.mark.parametrize(
    ("settings", "device", "num_blocks"),
    [
        pytest.param({}, "cpu", 32 * 17, id="256 tokens for each request, and a draft"),
        pytest.param({"max_num_seqs": 8}, "cpu", (8192 + 4 + 15) // 16, id="one of full length, if that is more"),
        pytest.param({"max_model_len": 128}, "cpu", 32 * 9, id="no more than full length for each"),
        pytest.param({"memory_fraction": 0.5}, "cpu", 32 * 513, id="what is configured"),
        pytest.param({}, "gpu0", 32 * 513, id="on GPUs, what all requests of full length need"),
    ],
)
def test_an_llm_on_a_cpu_leaves_a_notebook_its_memory(settings, device, num_blocks):
    """SmolLM2-135M in float32: with its weights, its cache takes less than a gigabyte of 64."""
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    config, engine = LlamaConfig(**sizes, vocab_size=49_152, max_position_embeddings=8192), EngineConfig(**settings)
    needs = of_weights("smollm2", 538_000_000, config, engine, longest=8192, dtype=torch.float32)
    cache = plan_cache(64 * GIB, [needs], engine, device=device, is_script=True)
    assert cache.num_blocks == num_blocks
    if device == "cpu" and "memory_fraction" not in settings:
        assert needs.weight_bytes + num_blocks * engine.block_size * needs.kv_token_bytes < 1e9
    served = plan_cache(64 * GIB, [needs], engine, device=device).num_blocks
    assert served == 32 * 513 or settings


def test_a_pass_has_no_more_logits_than_tokens():
    many, all_tokens = (worker("1B", EngineConfig(max_num_seqs=count)) for count in (1024 // 5 + 1, 10_000))
    assert many.workspace_bytes == all_tokens.workspace_bytes


def test_a_number_from_the_configuration_is_taken_as_it_is():
    assert blocks(1, ["70B"], num_blocks=7) == 7


def small(max_model_len):
    return Footprint("model", 100, 0, 1, max_model_len)


@pytest.mark.parametrize(("free_bytes", "blocks"), [(100 + 63, None), (100 + 64, 4), (100 + 80, 5)])
def test_one_request_of_full_length_is_enough_and_less_is_refused(free_bytes, blocks):
    engine = EngineConfig(memory_fraction=1.0, num_speculative_tokens=0)
    if blocks is None:
        with pytest.raises(ModelError, match="are free"):
            plan_cache(free_bytes, [small(64)], engine, device="gpu0")
    else:
        assert plan_cache(free_bytes, [small(64)], engine, device="gpu0").num_blocks == blocks


def test_half_of_a_cpus_memory_is_left_to_other_processes_and_a_tenth_of_a_gpus():
    engine = EngineConfig(max_num_seqs=10**6)
    assert plan_cache(100 + 16_000, [small(64)], engine, device="cpu").num_blocks == 500
    assert plan_cache(100 + 16_000, [small(64)], engine, device="gpu0").num_blocks == 900


def with_states(state_bytes, free_bytes, **settings):
    engine = EngineConfig(max_num_seqs=4, memory_fraction=1.0, num_speculative_tokens=0, **settings)
    return plan_cache(100 + free_bytes, [replace(small(64), state_bytes=state_bytes)], engine, device="gpu0")


def test_states_get_half_of_the_memory_at_most_and_blocks_the_rest():
    """Two slots for each of four requests and four more; blocks never take more than the requests need."""
    assert with_states(10, 10_000) == CacheSize(4 * 4, 12)
    assert with_states(10, 130) == CacheSize((130 - 6 * 10) // 16, 6)
    assert with_states(10, 160, num_states=2) == CacheSize((160 - 20) // 16, 2)
    assert with_states(10, 0, num_blocks=7) == CacheSize(7, 12)
    assert with_states(10, 0, num_blocks=7, num_states=3) == CacheSize(7, 3)


def test_a_slot_for_each_request_and_one_more_is_enough_and_fewer_are_refused_with_figures():
    assert with_states(GIB, 10 * GIB).num_states == 5
    with pytest.raises(ModelError, match=r"blocks and 4 state slots of 1.0 GiB .* max_num_seqs 4 needs 5 slots; lower"):
        with_states(GIB, 10 * GIB - 1)
    with pytest.raises(ModelError, match=r"2 state slots of 50.0 GiB, but one request of 64 tokens needs .* max_num"):
        with_states(50 * GIB, 100 * GIB + 63, num_states=2)
