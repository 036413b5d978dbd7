"""Packed checkpoints, written here by the formats' definitions, are read exactly, stay packed, and write their text."""

import logging

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.layers.quantization import QuantizedLinear
from engine.models.registry import open_model
from tests.engine.models.layers.test_quantization import (
    WIDE,
    bytes_of,
    greedy,
    mark,
    planned,
    reference,
    rotary_bytes,
    write,
)
from tests.engine.tiny import EXPERTS, HEADS, LATENT, backend_of, model_of, save

ROW = {"bits": 4, "group_size": 32}


def rounded(weight, bits, group, *, zeros):
    """Integers without sign [out, in], zeros and scales [out, groups], and what they stand for, in float32."""
    parts, top = weight.double().numpy().reshape(len(weight), -1, group), 2**bits - 1
    low, high = parts.min(-1), parts.max(-1)
    scales = ((high - low) / top if zeros else 2 * np.abs(parts).max(-1) / top).astype(np.float16)
    zero = np.clip(np.round(-low / scales), 1, top) if zeros else np.full(low.shape, (top + 1) // 2)
    integers = np.clip(np.round(parts / scales[..., None]) + zero[..., None], 0, top)
    floats = (integers - zero[..., None]).astype(np.float32) * scales[..., None].astype(np.float32)
    return integers.reshape(weight.shape).astype(np.int64), zero.astype(np.int64), scales, floats.reshape(weight.shape)


def words(numbers, bits, order=range(8)):
    """Words of 32 bits along the last axis: the number `order[n]` of each is at the place n."""
    count = 32 // bits
    total = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // count), np.uint32)
    for place in range(count):
        total |= (numbers[..., list(order)[place] :: count] << bits * place).astype(np.uint32)
    return torch.from_numpy(total.view(np.int32).copy())


def gptq(weight, *, bits=4, zeros=True, version=1, shuffled=False):
    order = np.random.default_rng(1).permutation(weight.shape[1]) if shuffled else np.arange(weight.shape[1])
    integers, zero, scales, floats = rounded(weight[:, order], bits, 32, zeros=zeros)
    back = np.argsort(order)
    parts = {
        "qweight": words(integers[:, back], bits).T.contiguous(),
        "qzeros": words((zero - (version == 1)).T, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(back // 32).int(),
    }
    return parts, floats[:, back]


def awq(weight):
    integers, zero, scales, floats = rounded(weight, 4, 32, zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(integers.T, 4, order), "qzeros": words(zero.T, 4, order)}
    return parts | {"scales": torch.from_numpy(scales.T.copy())}, floats


def compressed(weight, *, bits=4, zeros=False, group=32):
    integers, zero, scales, floats = rounded(weight, bits, group or weight.shape[1], zeros=zeros)
    parts = {"weight_packed": words(integers, bits), "weight_scale": torch.from_numpy(scales)}
    parts |= {"weight_shape": torch.tensor(weight.shape)}
    return parts | ({"weight_zero_point": words(zero.T, bits).T.contiguous()} if zeros else {}), floats


def naive(weight, *, zeros=False):
    integers, zero, scales, floats = rounded(weight, 8, weight.shape[1], zeros=zeros)
    parts = {"weight": torch.from_numpy(integers - 128).to(torch.int8), "weight_scale": torch.from_numpy(scales)}
    return parts | ({"weight_zero_point": torch.from_numpy(zero - 128).to(torch.int8)} if zeros else {}), floats


def fp8(weight, *, rows=1, columns=32, scale="weight_scale_inv", dtype=torch.float32):
    """Blocks of 8-bit floats; the last of them may be cut."""
    rows, columns = rows or len(weight), columns or weight.shape[1]
    factors = torch.empty(-(-len(weight) // rows), -(-weight.shape[1] // columns))
    stored, floats = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i, j in np.ndindex(*factors.shape):
        block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        factors[i, j] = (weight[block].abs().max() / 448).log2().ceil().exp2() * (1 if dtype.itemsize == 1 else 0.9)
        stored[block] = (weight[block] / factors[i, j]).to(torch.float8_e4m3fn)
        floats[block] = stored[block].float() * factors[i, j]
    stored_factors = factors.to(torch.float8_e8m0fnu).view(torch.uint8) if dtype.itemsize == 1 else factors
    return {"weight": stored, scale: stored_factors[0, 0] if factors.numel() == 1 else stored_factors}, floats


def scheme(**weights):
    return {"format": "any", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": []}


CT, V2, FP8 = "compressed-tensors", {"checkpoint_format": "gptq_v2"}, {"activation_scheme": "dynamic"}
GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PUBLISHED = {"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
CASES = {
    "gptq, symmetric": (gptq, {"zeros": False}, {"quant_method": "gptq", "desc_act": False} | ROW),
    "gptq": (gptq, {}, {"quant_method": "gptq", "checkpoint_format": "gptq"} | ROW),
    "gptq, version 2": (gptq, {"version": 2}, {"quant_method": "gptq"} | ROW | V2),
    "gptq, 8 bits": (gptq, {"bits": 8}, {"quant_method": "gptq", "bits": 8}),
    "gptq, by activation": (gptq, {"shuffled": True}, {"quant_method": "gptq", "desc_act": True} | ROW),
    "awq": (awq, {}, {"quant_method": "awq", "version": "gemm", "zero_point": True} | ROW),
    "compressed": (compressed, {}, {"quant_method": CT} | scheme(**GROUPS) | PUBLISHED),
    "compressed, zeros": (compressed, {"zeros": True}, {"quant_method": CT} | scheme(num_bits=4)),
    "compressed, 8 bits": (compressed, {"bits": 8, "group": 0}, {"quant_method": CT} | scheme(num_bits=8)),
    "int8": (naive, {}, {"quant_method": CT} | scheme(num_bits=8)),
    "int8, zeros": (naive, {"zeros": True}, {"quant_method": CT} | scheme(num_bits=8)),
    "fp8, outputs": (fp8, {"columns": 0, "scale": "weight_scale"}, {"quant_method": CT} | scheme(num_bits=8)),
    "fp8, one": (fp8, {"rows": 0, "columns": 0, "scale": "weight_scale"}, {"quant_method": CT} | scheme(num_bits=8)),
    "fp8, compressed blocks": (
        fp8,
        {"rows": 48, "scale": "weight_scale"},
        {"quant_method": CT} | scheme(num_bits=8, block_structure=[48, 32]),
    ),
    "fp8, blocks": (fp8, {"rows": 32}, {"quant_method": "fp8", "weight_block_size": [32, 32]} | FP8),
    "fp8, cut blocks": (fp8, {"rows": 48, "columns": 48}, {"quant_method": "fp8", "weight_block_size": [48, 48]} | FP8),
    "mxfp8": (fp8, {"dtype": torch.uint8}, {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
}
FLOATS = ("gptq, by activation", "fp8, cut blocks")
READ_BY_TRANSFORMERS = ("compressed", "fp8, blocks")


def save_case(name, path, *, config=None, factor=8.0, is_packed=lambda name: "_proj.weight" in name):
    """Write a packed checkpoint, and the model that it stands for."""
    pack, options, settings = CASES[name]
    config = config or transformers.LlamaConfig(**WIDE, attention_bias=True)
    for folder in (path, path / "floats"):
        save(config, folder, factor=factor)
    weights = load_file(path / "model.safetensors")
    floats = dict(weights)
    for key in [key for key in weights if is_packed(key)]:
        parts, stands_for = pack(weights.pop(key), **options)
        floats[key] = torch.as_tensor(stands_for).contiguous()
        weights |= {key.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    save_file(floats, path / "floats" / "model.safetensors", {"format": "pt"})
    mark(path, **settings)
    return floats


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_definition_and_the_text_is_that_of_their_floats(name, tmp_path, caplog):
    floats = save_case(name, tmp_path)
    with caplog.at_level(logging.INFO):
        backend = backend_of(tmp_path)
    block, prefix = backend.model.module.model.layers[1], "model.layers.1."
    for path, names in (
        ("self_attn.q_proj.linear", [f"self_attn.{one}_proj" for one in "qkv"]),
        ("mlp.gate_proj.linear", ["mlp.gate_proj", "mlp.up_proj"]),
        ("mlp.down_proj", ["mlp.down_proj"]),
    ):
        layer, weight = block.get_submodule(path), torch.cat([floats[f"{prefix}{one}.weight"] for one in names])
        assert isinstance(layer, QuantizedLinear) == (name not in FLOATS)
        found = layer.weight if name in FLOATS else layer.weight_as(torch.float32)
        assert torch.equal(found, weight)
        assert name in FLOATS or layer.values.is_contiguous(), "kernels read rows of numbers side by side"
    module = reference(tmp_path / "floats")
    assert torch.equal(block.self_attn.q_proj.linear.bias[:64], module.model.layers[1].self_attn.q_proj.bias)
    text = greedy(module, 16)
    assert len(set(text)) > 4
    assert write(backend, count=16) == text
    if name in READ_BY_TRANSFORMERS:
        mark(tmp_path, **CASES[name][2], dequantize=True)
        assert greedy(reference(tmp_path), 16) == text
        mark(tmp_path, **CASES[name][2])
    size = bytes_of(backend) - rotary_bytes(backend)
    assert size <= planned(tmp_path) <= 1.05 * size
    assert ("become floats: model.layers.0" in caplog.text) == (name in FLOATS)
    assert backend.model.info.num_parameters >= sum(weight.numel() for weight in floats.values() if weight.dim() > 1)
    if name not in FLOATS:
        assert size < 0.45 * 4 * sum(weight.numel() for weight in floats.values())


def test_packed_experts_heads_and_embeddings_become_floats_as_the_log_says(tmp_path, caplog):
    config = transformers.Qwen3MoeConfig(**WIDE | HEADS | EXPERTS | {"moe_intermediate_size": 32})
    names = ("_proj.weight", "lm_head.weight", "embed_tokens.weight")
    floats = save_case("awq", tmp_path, config=config, is_packed=lambda name: name.endswith(names))
    with caplog.at_level(logging.INFO):
        backend = backend_of(tmp_path)
    assert "no product of ours reads 6 of the packed weights, which become floats: lm_head.weight" in caplog.text
    module = backend.model.module
    assert torch.equal(module.lm_head.weight, floats["lm_head.weight"])
    assert torch.equal(module.model.layers[0].mlp.experts.down_proj[3],
                       floats["model.layers.0.mlp.experts.3.down_proj.weight"])  # fmt: skip
    assert isinstance(module.model.layers[0].self_attn.o_proj, QuantizedLinear)
    assert write(backend, count=12) == greedy(reference(tmp_path / "floats"), 12)
    assert planned(tmp_path) == bytes_of(backend) - rotary_bytes(backend)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_plan_counts_the_layer_that_expands_latents_as_floats(quantization, tmp_path):
    config = transformers.MiniCPM3Config(**WIDE | LATENT | {"kv_lora_rank": 64})
    if quantization == "none":
        save_case("int8", tmp_path, config=config)
    else:
        save(config, tmp_path)
    backend = backend_of(tmp_path, quantization=quantization)
    assert abs(planned(tmp_path, quantization) - bytes_of(backend) + rotary_bytes(backend)) < 16  # factors


def test_checkpoints_of_other_layouts_are_refused_by_what_they_have(tmp_path):
    save_case("awq", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for settings, message in (
        ({"quant_method": "awq", "version": "gemv"}, "quantised as awq with version 'gemv'; served: gemm"),
        ({"quant_method": "gptq", "bits": 3}, "quantised as gptq with bits 3; served: 4, 8"),
        ({"quant_method": CT, "transform_config": {"u": 1}}, "with transform_config {'u': 1}; served: none"),
        ({"quant_method": "gptq", "bits": 4}, r"scales of the shape \[64, 4\], for weights of \[8, 1024\]"),
        ({"quant_method": "bitsandbytes"}, "quantised as bitsandbytes, which is not served; use a model that is saved"),
    ):
        mark(tmp_path, **settings)
        with pytest.raises(ModelError, match=message):
            model_of(tmp_path)
    mark(tmp_path, **CASES["awq"][2])
    halves = {name: tensor.chunk(2, 1)[0].contiguous() for name, tensor in weights.items() if "0.mlp.up_proj" in name}
    for extra, message in (
        (halves, r"up_proj is \[64, 64\], and its config.json gives \[128, 64\]"),
        ({"model.layers.0.mlp.act_fn.scales": torch.ones(4)}, "act_fn.scales is of no layout of awq that is served"),
        ({"model.layers.0.mlp.up_proj.scales": None}, r"up_proj.q\w+ is of no layout of awq"),
        ({"model.layers.0.self_attn.q_proj.bias": None}, "lacks the weights model.layers.0.self_attn.q_proj"),
        ({"model.layers.0.mlp.up_proj.scales": torch.ones(3, 128)}, r"scales of the shape \[128, 3\]"),
    ):
        changed = {name: tensor for name, tensor in (weights | extra).items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=message):
            model_of(tmp_path)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            b"GGUF\x03\0\0\0" + b"\xff" * 16,
            r"cannot read a model configuration from .*a\.gguf: .*; the original model's",
        ),
        (
            b"GGUF ... llama.rope.scaling.factor ...",
            r"a\.gguf scales positions, which transformers does not read there; th",
        ),
    ],
)
def test_a_gguf_file_that_does_not_say_all_is_refused_without_a_configuration(added, message, tmp_path):
    (tmp_path / "a.gguf").write_bytes(added)
    with pytest.raises(ModelError, match=message):
        _ = open_model(ModelConfig(str(tmp_path))).configuration
