"""Quantised weights: the text is that of transformers' own quantised model; what cannot be served is refused."""

import importlib.util
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.config import EngineConfig, ModelConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.errors import ModelError
from engine.execution.footprint import footprint
from engine.models.first_layers import first_layers
from engine.models.layers import quantization
from engine.models.layers.quantization import QuantizedLinear, pack_nibbles
from engine.models.registry import open_model
from engine.params import SamplingParams
from tests.engine.models.test_shards import logits_of
from tests.engine.running import make_engine, run
from tests.engine.tiny import HEADS, SIZES, backend_of, save

WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 128}
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(transformers.LlamaConfig(**WIDE, attention_bias=True), tmp_path_factory.mktemp("llama"), factor=8.0)


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory):
    return save(transformers.LlamaConfig(**WIDE), tmp_path_factory.mktemp("draft"), seed=1, factor=8.0)


def load(path, quantization="none", dtype="float32"):
    return backend_of(path, quantization=quantization, dtype=dtype)


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


def write(backend, draft=None, k=0, count=24):
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    drafter = None if draft is None else lambda config: ModelDrafter(DraftModel(draft, token_limit=64), config)
    return run(make_engine(backend, drafter, num_speculative_tokens=k), [(PROMPT, sampling)])["0"]


def check_texts(backend, module, draft):
    """The text is transformers' own, without drafts and with another model's."""
    text = greedy(module)
    assert len(set(text)) > 5
    assert write(backend) == write(backend, draft, 4) == text
    return text


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_text_is_that_of_the_model_that_transformers_quantises(name, path, draft_path):
    backend = load(path, name)
    text = check_texts(backend, quantised_reference(path, name), load(draft_path, "int8"))
    assert text != greedy(reference(path))
    assert planned(path, name) == bytes_of(backend) - rotary_bytes(backend) < planned(path) / 2


def bytes_of(backend):
    module = backend.model.module
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def rotary_bytes(backend):
    return sum(buffer.nbytes for name, buffer in backend.model.module.named_buffers() if "inv_freq" in name)


def planned(path, quantization="none", world_size=1):
    """The bytes of weights in the plan."""
    source = open_model(ModelConfig(str(path), quantization=quantization))
    settings = {"dtype": torch.float32, "bytes_per_weight": 4, "world_size": world_size}
    return footprint(source, EngineConfig(), **settings).weight_bytes


def test_tables_that_no_file_bounds_are_refused_before_they_are_allocated():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}
    with pytest.raises(ValueError, match=r"tables of positions would have 8,000,000,000 numbers"):
        quantization.on_meta(transformers.PhiConfig(**SIZES, rope_parameters=rope))


def test_inputs_that_do_not_fit_into_groups_are_refused_by_name(tmp_path):
    save(transformers.LlamaConfig(**WIDE | {"intermediate_size": 80}), tmp_path)
    with pytest.raises(ModelError, match=r"multiple of 32, but model\.layers\.0\.mlp\.down_proj has 80"):
        load(tmp_path, "int4")
    load(tmp_path, "int8")


def test_a_package_that_is_missing_is_named(path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="int8 needs the package torchao, which is not installed"):
        load(path, "int8")
    with pytest.raises(ModelError, match="torchao"):
        planned(path, "int8")


def mark(path, **settings):
    """Say in a model's configuration that it is saved quantised."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))


@pytest.mark.parametrize(
    ("saved", "quantization", "problem"),
    [
        ("nvfp4", "none", "is quantised as nvfp4, which is not served"),
        ("mxfp4", "int8", "already quantised, as mxfp4; it cannot be quantised to int8"),
        ("mxfp4", "none", "mxfp4 is served in gpt-oss, not in LlamaForCausalLM"),
    ],
)
def test_a_saved_format_that_is_not_served_is_refused_by_name(saved, quantization, problem, tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    mark(tmp_path, quant_method=saved)
    with pytest.raises(ModelError, match=problem):
        load(tmp_path, quantization)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_model_that_torchao_has_saved_stays_quantised(name, path, draft_path, tmp_path):
    module = quantised_reference(path, name)
    module.save_pretrained(tmp_path)
    backend = load(tmp_path)
    check_texts(backend, reference(tmp_path), load(draft_path))
    assert any(isinstance(layer, QuantizedLinear) for layer in backend.model.module.modules())
    assert bytes_of(backend) == bytes_of(load(path, name))
    assert planned(tmp_path) >= bytes_of(backend) - rotary_bytes(backend)


def test_torchaos_weights_with_zeros_stay_quantised_and_quantised_inputs_are_refused(path, draft_path, tmp_path):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig, MappingType, PerGroup

    settings = IntxWeightOnlyConfig(
        weight_dtype=torch.int8, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
    )
    reference(path, quantization_config=transformers.TorchAoConfig(settings)).save_pretrained(tmp_path / "zeros")
    backend = load(tmp_path / "zeros")
    check_texts(backend, reference(tmp_path / "zeros"), load(draft_path))
    layer = backend.model.module.model.layers[0].mlp.down_proj
    assert layer.zeros.any()
    assert torch.equal(
        layer.weight_as(torch.float32), reference(tmp_path / "zeros").model.layers[0].mlp.down_proj.weight.dequantize()
    )
    dynamic = transformers.TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    reference(path, quantization_config=dynamic).save_pretrained(tmp_path / "dynamic")
    with pytest.raises(ModelError, match="quantise their inputs"):
        load(tmp_path / "dynamic")


def save_packed(path, floats_path, **changes):
    """Write gpt-oss with packed weights as it is published, and the floats that transformers makes of it."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    for folder in (path, floats_path):
        save(transformers.GptOssConfig(**WIDE | HEADS | sizes | changes), folder, factor=8.0)
    weights = load_file(path / "model.safetensors")
    floats = dict(weights)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        size = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 124, size, generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    save_file(floats, floats_path / "model.safetensors", {"format": "pt"})
    mark(path, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    return weights


@torch.inference_mode()
def test_gpt_oss_experts_stay_packed_and_compute_what_their_floats_do(tmp_path):
    stored = save_packed(tmp_path, tmp_path / "floats")
    backend, floats = load(tmp_path), load(tmp_path / "floats")
    check_texts(backend, reference(tmp_path / "floats"), floats)
    logits, expected = logits_of([backend, floats])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert backend.model.info.num_parameters == floats.model.info.num_parameters
    halves = [first_layers(each.model, 1).info.num_parameters for each in (backend, floats)]
    assert halves[0] == halves[1]
    tensors = backend.model.module.state_dict()
    packed = [name for name in stored if name.endswith(("_blocks", "_scales"))]
    assert len(packed) == 8
    assert all(torch.equal(tensors[name], stored[name]) for name in packed)
    assert planned(tmp_path) == bytes_of(backend) - rotary_bytes(backend)


def test_packed_weights_that_are_not_whole_are_refused(tmp_path):
    stored = save_packed(tmp_path, tmp_path / "floats")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        load(tmp_path)


def integers(num_bits, shape, seed=0):
    low, high = -(2 ** (num_bits - 1)), 2 ** (num_bits - 1)
    numbers = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    numbers.view(-1)[:2] = torch.tensor([low, high - 1], dtype=torch.int8)[: numbers.numel()]
    return numbers


def layer_of(num_bits, *, groups, bias=True, outputs=6, inputs=8, seed=0, zeros=False):
    """A layer, and its weights as floats."""
    numbers = integers(num_bits, (outputs, inputs), seed)
    scales = torch.rand(outputs, groups, generator=torch.Generator().manual_seed(seed + 1)) + 0.1
    zero = integers(num_bits, (outputs, groups), seed + 2) if zeros else torch.zeros(outputs, groups)
    weight = (numbers - zero.float().repeat_interleave(inputs // groups, 1)) * scales.repeat_interleave(
        inputs // groups, 1
    )
    layer = QuantizedLinear(
        pack_nibbles(numbers) if num_bits == 4 else numbers,
        scales,
        torch.arange(outputs) * 1.0 if bias else None,
        zero if zeros else None,
    )
    return layer, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_bits", "groups"), [(8, 1), (8, 4), (4, 1), (4, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_products_are_those_of_the_weights_as_floats(num_bits, groups, zeros, dtype):
    layer, weight = layer_of(num_bits, groups=groups, zeros=zeros)
    assert (layer.in_features, layer.out_features, layer.num_bits) == (8, 6, num_bits)
    layer.bias = layer.bias.to(dtype)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = x.float() @ weight.T + layer.bias
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x).float(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 8.0)
