"""What a model takes, read before it loads, against what it takes once it is loaded."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    Mistral3Config,
    T5Config,
)

from engine.config import EngineConfig, ModelConfig
from engine.execution.footprint import footprint, of_weights
from engine.execution.registry import make_backend
from engine.heads.registry import load_target
from engine.models.layers.quantization import layer_bytes, linear_layers, on_meta
from engine.models.registry import open_model
from tests.engine.conftest import VOCAB, save_llama
from tests.engine.heads.files import head_settings, head_tensors, save_head
from tests.engine.hybrids.models import BAMBA
from tests.engine.tiny import GEMMA4, MISTRAL3, SIZES, T5_SIZES, backend_of, save


def measure(path, *, world_size=1, quantization="none", **settings):
    return footprint(
        open_model(ModelConfig(path, quantization=quantization)),
        EngineConfig(**settings),
        dtype=torch.float32,
        bytes_per_weight=4,
        world_size=world_size,
    )


MODELS = {
    "llama": (LlamaConfig(**SIZES), {}),
    "an fp8 cache": (LlamaConfig(**SIZES), {"kv_cache_dtype": "fp8"}),
    "layers of two sizes": (Gemma4TextConfig(**SIZES | GEMMA4 | {"num_global_key_value_heads": 2}), {}),
    "encoder-decoder": (T5Config(**T5_SIZES), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_keys_and_values_take_what_is_loaded_and_allocated(name, tmp_path):
    config, settings = MODELS[name]
    backend, source = backend_of(save(config, tmp_path), **settings), open_model(ModelConfig(str(tmp_path), **settings))
    planned = footprint(source, EngineConfig(), dtype=torch.float32, bytes_per_weight=4)
    module = backend.model.module
    scalars = [buffer for path, buffer in module.named_buffers() if path.endswith("layer_scalar")]  # are saved, too
    assert planned.weight_bytes == 4 * sum(tensor.numel() for tensor in [*module.parameters(), *scalars])
    assert planned.max_model_len == backend.info.max_model_len
    kv = backend.allocate_kv(3, 16)
    assert planned.kv_token_bytes == sum(cache.nbytes for cache in (*kv.keys, *kv.values)) // (3 * 16)
    if name == "llama":
        AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path, max_shard_size="10KB")
        (tmp_path / "model.safetensors").unlink()
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        assert measure(str(tmp_path)).weight_bytes == planned.weight_bytes


def test_a_rank_takes_its_slices_and_all_that_every_rank_holds_whole(target_path):
    """Embeddings, head and norms are whole on both ranks; all other layers are halves."""
    whole, half = measure(target_path), measure(target_path, world_size=2)
    kept_whole = 4 * (2 * VOCAB * 32 + 5 * 32)
    assert half.weight_bytes == kept_whole + (whole.weight_bytes - kept_whole) // 2
    assert half.kv_token_bytes == whole.kv_token_bytes // 2
    lengths = [measure(target_path, max_model_len=length).max_model_len for length in (100, 100_000)]
    assert lengths == [100, whole.max_model_len]


def test_a_pass_over_more_tokens_wider_layers_or_more_masks_needs_more_workspace(target_path):
    for field in ("max_num_batched_tokens", "max_num_seqs", "num_speculative_tokens"):
        small, large = measure(target_path, **{field: 4}), measure(target_path, **{field: 64})
        assert small.workspace_bytes < large.workspace_bytes, field

    def workspace(config):
        return of_weights("x", 0, config, EngineConfig(), longest=2048, dtype=torch.float32).workspace_bytes

    sizes = {"num_hidden_layers": 2, "hidden_size": 32}
    narrow, mixed, wide = (
        workspace(Gemma3nTextConfig(**sizes, intermediate_size=widths)) for widths in ([64] * 2, [64, 1024], [1024] * 2)
    )
    assert narrow < mixed == wide
    few, many = (workspace(T5Config(**T5_SIZES | {"num_heads": heads, "d_kv": 48 // heads})) for heads in (2, 4))
    assert many - few == 2 * 2 * 1024 * 2048 * 4


def test_a_text_part_is_counted_quantised_whatever_its_layers_are_called_in_the_files(tmp_path):
    path = save(Mistral3Config(**MISTRAL3, tie_word_embeddings=False), tmp_path)
    floats, rounded = (measure(path, quantization=name).weight_bytes for name in ("none", "int8"))
    layers = linear_layers(on_meta(open_model(ModelConfig(path)).configuration)).values()
    sizes = [(layer.out_features, layer.in_features) for layer in layers]
    assert len(sizes) == 4 * 7
    assert floats - rounded == sum(
        4 * outputs * inputs - layer_bytes("int8", outputs, inputs) for outputs, inputs in sizes
    )


def test_slots_take_what_the_cache_allocates_and_a_pass_has_one_chunk_more(tmp_path, monkeypatch):
    path, settings = save(BambaConfig(**BAMBA), tmp_path), {"num_speculative_tokens": 3}
    planned = measure(path, max_num_batched_tokens=100, **settings)
    kv = backend_of(path).allocate_kv(3, 16, num_slots=5, depth=3)
    slots = [tensor for layer in kv.extras.layers for tensor in (layer.inputs, layer.matrices, *layer.updates)]
    assert planned.state_bytes == sum(tensor.nbytes for tensor in slots) // 5
    assert planned.kv_token_bytes == sum(cache.nbytes for cache in (*kv.keys, *kv.values)) // (3 * 16)
    monkeypatch.setattr("engine.execution.footprint.planned_states", lambda _: ([], 0))
    stateless = measure(path, max_num_batched_tokens=100 + BAMBA["mamba_chunk_size"], **settings)
    assert (stateless.state_bytes, stateless.workspace_bytes) == (0, planned.workspace_bytes)


def test_a_head_takes_what_is_loaded_and_allocated(tmp_path):
    target = str(save_llama(tmp_path / "target", seed=0))
    head = save_head(tmp_path / "head", head_settings(), head_tensors())
    sources = [open_model(ModelConfig(target, head=name, device="cpu", dtype="float32")) for name in (None, head)]
    plain, counted = (footprint(source, EngineConfig(), dtype=torch.float32, bytes_per_weight=4) for source in sources)
    loaded = load_target(sources[1])
    shared = {parameter.data_ptr() for parameter in loaded.module.lm.parameters()}
    own = [parameter for parameter in loaded.head.parameters() if parameter.data_ptr() not in shared]
    assert counted.weight_bytes - plain.weight_bytes == sum(parameter.nbytes for parameter in own)
    tapped = len(loaded.head.config.taps) * 32 * 4
    assert counted.workspace_bytes - plain.workspace_bytes == 2 * EngineConfig().max_num_batched_tokens * tapped
    kv = make_backend(loaded, sources[1]).allocate_kv(3, 4)
    assert counted.kv_token_bytes * 12 == sum(tensor.nbytes for tensor in (*kv.keys, *kv.values, kv.states))
    own_path = open_model(ModelConfig(target, head=target, device="cpu"))
    weights = footprint(own_path, EngineConfig(), dtype=torch.float32, bytes_per_weight=4).weight_bytes
    assert weights == plain.weight_bytes
