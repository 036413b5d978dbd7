"""The grouped product, interpreted on the CPU."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.kernels import grouped_product
from engine.models.layers import experts


def operands(tokens, top_k, num_experts=5, inner=80, outer=70, is_transposed=False):
    generator = torch.Generator().manual_seed(tokens)
    index = torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices
    shape = (num_experts, inner, outer) if is_transposed else (num_experts, outer, inner)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    rows = torch.randn(tokens, inner, generator=generator).half()
    return rows, index, weight.transpose(1, 2) if is_transposed else weight


def packed(num_experts, outputs, inputs, exponents=(0, 254)):
    """Random numbers of gpt-oss' format, and what transformers makes of them, [experts, out, in]."""
    generator, size = torch.Generator().manual_seed(0), (num_experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(*exponents, size, generator=generator, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256)
    return blocks.flatten(2), scales, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)


def multiply(rows, index, weight, bias=None, dtype=torch.float32, scales=None):
    order, ends = torch.ops.paceline.sort_by_expert(index, len(weight))
    return grouped_product.multiply(rows, order, ends, weight, bias, dtype, scales), (order, ends)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (40, 3), (30, 1)])
def test_every_pair_is_multiplied_by_its_experts_weight(tokens, top_k, is_transposed):
    rows, index, weight = operands(tokens, top_k, is_transposed=is_transposed)
    bias = torch.randn(5, 70).half()
    right = torch.einsum("ni,nkoi->nko", rows.double(), weight.double()[index])
    found, plan = multiply(rows, index, weight)
    torch.testing.assert_close(found.double().view_as(right), right, rtol=0, atol=1e-3)
    biased, _ = multiply(rows, index, weight, bias, torch.float16)
    assert torch.equal(biased, (found.half().float() + bias[index.flatten()].float()).half())
    pairs = rows.repeat_interleave(top_k, 0)
    assert torch.equal(grouped_product.multiply(pairs, *plan, weight, None, torch.float32), found)
    on_cpu = experts.grouped_linear(rows.float(), *plan, weight.float(), bias.float(), torch.float32)
    torch.testing.assert_close(biased.float(), on_cpu, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("is_packed", [False, True])
def test_no_bit_of_a_token_depends_on_the_others(is_packed, in_order):
    rows, index, weight = operands(90, 2, inner=160 if is_packed else 80)
    index[:40] = 4  # an expert may take many tokens
    weight, scales, floats = packed(5, 70, 160, (115, 124)) if is_packed else (weight, None, weight)
    together, _ = multiply(rows, index, weight, scales=scales)
    right = torch.einsum("ni,nkoi->nko", rows.double(), floats.double()[index]).flatten(0, 1)
    torch.testing.assert_close(together.double(), right, rtol=1e-5, atol=1e-3)
    for nth in (0, 41, 89):
        alone, _ = multiply(rows[nth : nth + 1], index[nth : nth + 1], weight, scales=scales)
        assert torch.equal(alone, together.view(90, 2, -1)[nth])


@pytest.mark.parametrize(("dtype", "exponents"), [(torch.float32, (0, 250)), (torch.float16, (100, 140))])
def test_packed_weights_become_transformers_numbers(dtype, exponents):
    """The rows are those of the identity, so that the result is the weight."""
    blocks, scales, floats = packed(3, 70, 160, exponents)
    found, _ = multiply(torch.eye(160, dtype=dtype), torch.ones(160, 1, dtype=torch.int64), blocks, scales=scales)
    assert torch.equal(found, floats[1].to(dtype).float().T)
