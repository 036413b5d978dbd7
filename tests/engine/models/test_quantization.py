"""Quantised weights: the text is that of transformers' own quantised model; what cannot be served is refused."""

import importlib.util
import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, ModelConfig
from engine.drafting.model import ModelDrafter
from engine.errors import ModelError
from engine.execution.registry import load_backend
from engine.models import quantization
from engine.models.causal_lm import Shard
from engine.models.footprint import footprint
from engine.models.loader import load_model
from engine.models.quantized_linear import QuantizedLinear, pack_nibbles
from engine.models.sub_layers import thin
from engine.sampling.params import SamplingParams
from tests.engine.running import make_engine, run
from tests.engine.tiny import HEADS, SIZES, save

WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 128}
PROMPT = list(range(3, 20))


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(transformers.LlamaConfig(**WIDE, attention_bias=True), tmp_path_factory.mktemp("llama"), factor=8.0)


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory):
    return save(transformers.LlamaConfig(**WIDE), tmp_path_factory.mktemp("draft"), seed=1, factor=8.0)


def load(path, quantization="none", dtype="float32"):
    return load_backend(ModelConfig(str(path), quantization=quantization, dtype=dtype, device="cpu"))


def reference(path, dtype=torch.float32, **arguments):
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager", **arguments).eval()


def quantised_reference(path, name):
    settings = transformers.TorchAoConfig(quantization.torchao_settings(name))
    return reference(path, quantization_config=settings)


@torch.no_grad()
def greedy(module, count=24):
    prompt = torch.tensor([PROMPT])
    output = module.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return output[0, len(PROMPT) :].tolist()


def write(backend, draft=None, k=0, count=24, **params):
    sampling = SamplingParams(**({"temperature": 0.0} | params), max_tokens=count, ignore_eos=True)
    drafter = None if draft is None else lambda config: ModelDrafter(draft, config, token_limit=64)
    return run(make_engine(backend, drafter, num_speculative_tokens=k), [(PROMPT, sampling)])["0"]


def check_texts(backend, module, draft):
    """The text is transformers' own, without drafts, with another model's and with its own."""
    text = greedy(module)
    assert len(set(text)) > 5
    assert write(backend) == text
    for drafting in (draft, backend):
        assert write(backend, drafting, 4) == text
    seeded = write(backend, temperature=0.8, seed=3)
    assert write(backend, draft, 4, temperature=0.8, seed=3) == seeded
    return text


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_text_is_that_of_the_model_that_transformers_quantises(name, path, draft_path):
    backend = load(path, name)
    text = check_texts(backend, quantised_reference(path, name), load(draft_path, "int8"))
    assert text != greedy(reference(path))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("settings", [{"self_draft_layers": 1}, {"self_draft_skip": ("attention.0", "mlp.1")}])
def test_a_quantised_target_drafts_for_itself_and_its_text_stays(settings, name, path):
    backend = load(path, name)
    params = [SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(8)]
    requests = [(PROMPT[i:], one) for i, one in enumerate(params)]
    plain = run(make_engine(backend, num_speculative_tokens=0), requests)
    engine = make_engine(backend, drafting="self", num_speculative_tokens=4, **settings)
    assert run(engine, requests) == plain
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_weights_of_a_thinned_model_are_counted_as_those_of_one_that_is_not_quantised(name, path):
    first = [thin(load(path, quantization).model, ["attention.1", "mlp.1"]).model for quantization in ("none", name)]
    assert first[0].info.num_parameters == first[1].info.num_parameters


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_and_scales_are_torchaos(name, path):
    module = load_model(ModelConfig(path, quantization=name), device=torch.device("cpu"), dtype=torch.float32).module
    for index, layer in enumerate(quantised_reference(path, name).model.layers):
        ours = module.model.layers[index]
        fused = ours.self_attn.q_proj.linear
        weights = [getattr(layer.self_attn, f"{part}_proj").weight for part in "qkv"]
        assert torch.equal(fused.integers, torch.cat([weight.qdata for weight in weights]))
        assert torch.equal(fused.scales, torch.cat([weight.scale for weight in weights]))
        assert torch.equal(ours.mlp.down_proj.integers, layer.mlp.down_proj.weight.qdata)
    assert type(module.lm_head) is torch.nn.Linear


def test_the_parameters_are_counted_as_before(path):
    assert load(path, "int4").info.num_parameters == load(path).info.num_parameters


def bytes_of(backend):
    module = backend.model.module
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_plan_counts_the_bytes_of_the_quantised_weights(name, path):
    def planned(quantization):
        config = ModelConfig(path, quantization=quantization)
        return footprint(config, EngineConfig(), dtype=torch.float32, bytes_per_weight=4).weight_bytes

    backend = load(path, name)
    rotary = sum(
        buffer.nbytes for buffer_name, buffer in backend.model.module.named_buffers() if "inv_freq" in buffer_name
    )
    assert planned(name) == bytes_of(backend) - rotary
    assert planned(name) < planned("none") / 2


def test_bfloat16_models_are_quantised_too(path):
    module = load(path, "int4", dtype="bfloat16").model.module
    layer = module.model.layers[0].mlp.down_proj
    assert layer.scales.dtype == torch.bfloat16
    assert layer(torch.ones(1, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_inputs_that_do_not_fit_into_groups_are_refused_by_name(tmp_path):
    save(transformers.LlamaConfig(**WIDE | {"intermediate_size": 80}), tmp_path)
    with pytest.raises(ModelError, match=r"multiple of 32, but model\.layers\.0\.mlp\.down_proj has 80"):
        load(tmp_path, "int4")
    load(tmp_path, "int8")


def test_encoder_decoders_are_refused(tmp_path):
    config = transformers.T5Config(vocab_size=64, d_model=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is t5, whose weights are not served quantised"):
        load(tmp_path, "int8")
    quantised = ModelConfig(str(tmp_path), quantization="int8")
    with pytest.raises(ModelError, match="is t5, whose weights are not served quantised"):
        footprint(quantised, EngineConfig(), dtype=torch.float32, bytes_per_weight=4)
    mark(tmp_path, quant_method="torchao")
    with pytest.raises(ModelError, match="is t5, whose weights are not served quantised"):
        load(tmp_path)


def test_a_package_that_is_missing_is_named(path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="int8 needs the package torchao, which is not installed"):
        load(path, "int8")
    with pytest.raises(ModelError, match="torchao"):
        footprint(ModelConfig(path, quantization="int8"), EngineConfig(), dtype=torch.float32, bytes_per_weight=4)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantised_weights_are_not_split_over_ranks(name, path):
    config = ModelConfig(path, quantization=name)
    with pytest.raises(ModelError, match=f"quantised weights .{name}. are not split over tensor-parallel ranks"):
        load_backend(config, shard=Shard(0, 2, lambda x: x))
    with pytest.raises(ModelError, match="not split"):
        footprint(config, EngineConfig(), dtype=torch.float32, bytes_per_weight=4, world_size=2)


def mark(path, **settings):
    """Say in a model's configuration that it is saved quantised."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))


@pytest.mark.parametrize("name", ["gptq", "awq", "bitsandbytes", "nvfp4", "fbgemm_fp8", "hqq"])
def test_a_saved_format_that_is_not_served_is_refused_by_name(name, tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    mark(tmp_path, quant_method=name)
    with pytest.raises(ModelError, match=f"is quantised as {name}, which is not served"):
        load(tmp_path)


def test_a_model_that_is_saved_quantised_is_not_quantised_again(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    mark(tmp_path, quant_method="mxfp4")
    with pytest.raises(ModelError, match="already quantised, as mxfp4; it cannot be quantised to int8"):
        load(tmp_path, "int8")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_model_that_torchao_has_saved_stays_quantised(name, path, draft_path, tmp_path):
    module = quantised_reference(path, name)
    module.save_pretrained(tmp_path)
    backend = load(tmp_path)
    check_texts(backend, reference(tmp_path), load(draft_path))
    assert any(isinstance(layer, QuantizedLinear) for layer in backend.model.module.modules())
    assert bytes_of(backend) == bytes_of(load(path, name))
    planned = footprint(ModelConfig(str(tmp_path)), EngineConfig(), dtype=torch.float32, bytes_per_weight=4)
    assert planned.weight_bytes >= bytes_of(backend)


def test_torchaos_other_weights_become_floats_and_quantised_inputs_are_refused(path, draft_path, tmp_path):
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerGroup,
    )

    settings = IntxWeightOnlyConfig(
        weight_dtype=torch.int8, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
    )
    reference(path, quantization_config=transformers.TorchAoConfig(settings)).save_pretrained(tmp_path / "zeros")
    backend = load(tmp_path / "zeros")
    check_texts(backend, reference(tmp_path / "zeros"), load(draft_path))
    assert not any(isinstance(layer, QuantizedLinear) for layer in backend.model.module.modules())
    dynamic = transformers.TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    reference(path, quantization_config=dynamic).save_pretrained(tmp_path / "dynamic")
    with pytest.raises(ModelError, match="quantise their inputs"):
        load(tmp_path / "dynamic")


def save_compressed(path, target):
    """Write a model as llm-compressor does: 4-bit integers in words of 32 bits, a scale for each group of 32."""
    weights = load_file(path + "/model.safetensors")
    for name in [name for name in weights if "_proj.weight" in name]:
        weight = weights.pop(name)
        groups = weight.view(len(weight), -1, 32)
        scales = groups.abs().amax(-1) / 7
        integers = (groups / scales.unsqueeze(-1)).round().clamp(-8, 7).flatten(1).to(torch.int32) + 8
        words = (integers.view(len(weight), -1, 8) << torch.arange(0, 32, 4)).sum(-1)
        base = name.removesuffix("weight")
        weights[base + "weight_packed"] = words.to(torch.uint32).view(torch.int32)
        weights[base + "weight_scale"] = scales
        weights[base + "weight_shape"] = torch.tensor(weight.shape)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }


def save_fp8(path, target):
    """Write a model as DeepSeek does: 8-bit floats, a scale for each block."""
    weights = load_file(path + "/model.safetensors")
    for name in [name for name in weights if "_proj.weight" in name]:
        weight = weights[name]
        blocks = weight.view(len(weight) // 16, 16, -1, 16)
        scales = blocks.abs().amax((1, 3)) / 448
        weights[name] = (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        weights[name + "_scale_inv"] = scales
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


@pytest.mark.parametrize("saver", [save_compressed, save_fp8])
def test_a_model_that_another_library_has_saved_becomes_floats_that_write_transformers_text(
    saver, path, draft_path, tmp_path
):
    transformers.AutoConfig.from_pretrained(path).save_pretrained(tmp_path)
    settings = saver(path, tmp_path)
    mark(tmp_path, **settings)
    backend = load(tmp_path)
    mark(tmp_path, **settings, dequantize=True)
    module = reference(tmp_path)
    assert check_texts(backend, module, load(draft_path)) != greedy(reference(path))
    planned = footprint(ModelConfig(str(tmp_path)), EngineConfig(), dtype=torch.float32, bytes_per_weight=4)
    assert planned.weight_bytes == 4 * module.num_parameters()


def test_gpt_oss_as_it_is_saved_becomes_floats(tmp_path):
    config = transformers.GptOssConfig(**WIDE | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2})
    save(config, tmp_path, factor=8.0)
    weights = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        size = (experts, outputs, inputs // 32)
        weights[name + "_blocks"] = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        weights[name + "_scales"] = torch.randint(120, 124, size, generator=generator, dtype=torch.uint8)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    mark(tmp_path, **settings)
    backend = load(tmp_path)
    mark(tmp_path, **settings, dequantize=True)
    check_texts(backend, reference(tmp_path), backend)


def test_weights_of_blocks_of_outputs_have_no_scale_for_each_output():
    class Weight(torch.Tensor):
        qdata = torch.ones(4, 8, dtype=torch.int8)
        scale = torch.ones(1, 1)
        zero_point = None

    weight = torch.zeros(4, 8).as_subclass(Weight)
    assert quantization._quantized_linear(weight, None) is None
    weight.scale = torch.ones(4, 2)
    assert quantization._quantized_linear(weight, None) is not None
    weight.zero_point = torch.ones(4, 2, dtype=torch.int8)
    assert quantization._quantized_linear(weight, None) is None


def test_bytes_of_a_layer_are_those_that_it_holds():
    linear = torch.nn.Linear(64, 6, bias=False)
    integers = torch.zeros(6, 64, dtype=torch.int8)
    for name, layer in (
        ("int8", QuantizedLinear(integers, torch.ones(6, 1), None)),
        ("int4", QuantizedLinear(pack_nibbles(integers), torch.ones(6, 2), None)),
    ):
        assert quantization.layer_bytes(name, linear) == sum(buffer.nbytes for buffer in layer.buffers())
