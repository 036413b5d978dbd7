"""The loader: what a loaded model is and is known by, and what is refused before a backend tries it."""

import pytest
import torch
import transformers

from engine.errors import ModelError
from engine.models import loader
from engine.models.causal_lm import CausalLM
from engine.models.layers.fusion import FusedLinear
from engine.models.layers.layer_attention import ATTENTION_NAME
from engine.models.loader import resolve_device, resolve_dtype
from tests.engine.tiny import SIZES, model_of, save, source_of

CPU = torch.device("cpu")
SECOND_GPU = torch.device("cuda", 1)


def test_a_loaded_model_is_frozen_fused_and_attends_with_our_function(target_path, caplog):
    with caplog.at_level("INFO"):
        model = model_of(target_path)
    size = f"{model.info.num_parameters / 1e6:.1f} M parameters in float32 on cpu"
    assert f"{target_path}: {size}, loaded in " in caplog.text
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert model.module.config._attn_implementation == ATTENTION_NAME
    assert sum(isinstance(layer, FusedLinear) for layer in model.module.modules()) == 2 * 2
    assert (model.device, model.dtype, model.shard) == (CPU, torch.float32, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_known_of_a_model_comes_from_its_files(dtype, tmp_path):
    config = transformers.LlamaConfig(**SIZES)
    save(config, tmp_path)
    transformers.GenerationConfig(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    info = (model := model_of(tmp_path, dtype=dtype)).info
    assert (info.name, info.vocab_size, info.max_model_len) == (str(tmp_path), 64, 512)
    assert info.eos_token_ids == [1, 7]
    assert info.num_parameters == transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert (info.dtype, info.device) == (dtype, "cpu")
    assert {parameter.dtype for parameter in model.module.parameters()} == {getattr(torch, dtype)}


def test_what_transformers_converts_is_converted_on_the_device(tmp_path, monkeypatch):
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)  # under names without "model."
    device, arguments = torch.device("cuda"), {}
    monkeypatch.setattr(CausalLM, "load_module", lambda *_, **given: arguments.update(given) or torch.nn.Module())
    source = source_of(tmp_path)
    loader.load_whole(source, loader.skeleton_of(source, torch.bfloat16), torch.bfloat16, device)
    assert arguments == {"device_map": {"": device}}


UNSERVED = {
    "layers that differ in more than heads": (
        "LlamaConfig",
        {"per_layer_config": {1: {"intermediate_size": 32}}},
        "differ in their intermediate_size",
    ),
    "attention to later tokens": ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "no text token by token"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_an_architecture_that_cannot_be_served_exactly_is_refused_by_its_configuration(name, tmp_path):
    cls, extra, reason = UNSERVED[name]
    getattr(transformers, cls)(**{**SIZES, **extra}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        model_of(tmp_path)


@pytest.mark.parametrize(("device", "resolved"), [("cuda", SECOND_GPU), ("auto", SECOND_GPU), ("cpu", CPU)])
def test_a_gpu_is_the_processs_current_one_with_its_index_unless_the_cpu_is_configured(device, resolved, cuda):
    """NCCL needs the index: "cuda" alone is not equal to "cuda:1"."""
    assert resolve_device(device) == resolved


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ModelError, match="no CUDA device"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("configured", "device", "has_bf16", "dtype"),
    [
        ("float16", CPU, True, torch.float16),
        ("float16", SECOND_GPU, True, torch.float16),
        ("auto", SECOND_GPU, True, torch.bfloat16),
        ("auto", SECOND_GPU, False, torch.float16),
        ("auto", CPU, True, torch.float32),
    ],
)
def test_weights_have_16_bits_on_a_gpu_unless_configured(configured, device, has_bf16, dtype, cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert resolve_dtype(configured, device) is dtype
