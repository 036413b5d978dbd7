"""Grouped experts compute what transformers' own do; no bit depends on the batch."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.config import EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.execution.footprint import footprint
from engine.models.causal_lm import Shard
from engine.models.layers import experts as experts_module
from engine.models.layers.experts import compute_experts, experts_of, group_experts, unpack
from engine.models.registry import open_model
from tests.engine.models.test_shards import load_ranks, logits_of
from tests.engine.ranks import AbsentOthers
from tests.engine.tiny import EXPERTS, HEADS, LATENT, SIZES, backend_of, save

FAMILIES = {
    "Qwen3Moe": HEADS,
    "Mixtral": {},
    "GptOss": HEADS,
    "DeepseekV3": LATENT,
    "Qwen2Moe": {},
}


def model_of(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | EXPERTS | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_logits_are_transformers_own(family):
    model, tokens = model_of(family), torch.arange(20).view(2, 10)
    expected = model(tokens).logits
    assert experts_of(model)
    group_experts(model)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def experts(num_experts=3, size=1):
    """Experts whose results are their number's weight, exactly."""
    return SimpleNamespace(
        num_experts=num_experts,
        has_gate=False,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        act_fn=lambda inner: inner,
        up_proj=torch.ones(num_experts, size, size),
        down_proj=torch.tensor([1.0, 1e8, -1e8])[:, None, None].expand(num_experts, size, size),
    )


def test_a_tokens_results_are_added_in_order_of_experts():
    """1 + 1e8 - 1e8 is 0 in order of experts, and 1 in the order of the router's choice."""
    found = compute_experts(experts(), torch.ones(1, 1), torch.tensor([[2, 1, 0]]), torch.ones(1, 3))
    assert found.item() == 0.0
    found = compute_experts(experts(), torch.ones(1, 1), torch.tensor([[0, 2, 1]]), torch.tensor([[0.5, 2.0, 1.0]]))
    assert found.item() == -1e8, "weights follow their experts"


def packed(num_experts, outputs, inputs, exponents=(0, 254)):
    """Random numbers of gpt-oss' format, and what transformers makes of them, [experts, out, in]."""
    generator, size = torch.Generator().manual_seed(0), (num_experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(*exponents, size, generator=generator, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256)
    return blocks.flatten(2), scales, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_numbers_are_transformers_own(dtype):
    blocks, scales, _ = packed(1, 8, 128)
    expected = convert_moe_packed_tensors(blocks.view(1, 8, 4, 16), scales, dtype=dtype)[0].T
    assert torch.equal(unpack(blocks[0], scales[0], dtype), expected)


def test_only_experts_that_tokens_choose_are_unpacked(monkeypatch):
    blocks, scales, floats = packed(5, 8, 64, (115, 124))
    taken = []
    monkeypatch.setattr(experts_module, "unpack", lambda *given: taken.append(given) or unpack(*given))
    rows, index = torch.randn(3, 64), torch.tensor([[3], [1], [3]])
    plan = torch.ops.paceline.sort_by_expert(index, 5)
    found = experts_module.grouped_linear(rows, *plan, blocks, None, torch.float32, scales)
    torch.testing.assert_close(found, torch.einsum("ni,noi->no", rows, floats[index[:, 0]]))
    assert [given[0].data_ptr() for given in taken] == [blocks[1].data_ptr(), blocks[3].data_ptr()]


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_two_ranks_compute_the_whole_models_logits_with_half_of_every_expert(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(**SIZES | EXPERTS | FAMILIES[family])
    path = save(config, tmp_path, factor=3.0)
    ranks, _ = load_ranks(path, 2)
    (expected,) = logits_of([backend_of(path)])
    for logits in logits_of(ranks):
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    source = open_model(ModelConfig(path))
    planned = footprint(source, EngineConfig(), dtype=torch.float32, bytes_per_weight=4, world_size=2)
    module = ranks[0].model.module
    buffers = sum(buffer.nbytes for name, buffer in module.named_buffers() if "inv_freq" not in name)
    assert planned.weight_bytes == sum(parameter.nbytes for parameter in module.parameters()) + buffers


def test_a_missing_expert_is_named(tmp_path):
    path = save(transformers.MixtralConfig(**SIZES | EXPERTS), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights[next(name for name in weights if ".experts.1.w3" in name)]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.\d\.mlp\.experts\.gate_up_proj"):
        backend_of(path, Shard(0, 2, AbsentOthers()))
