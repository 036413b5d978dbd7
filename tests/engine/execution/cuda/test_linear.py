"""The layers that use our product, which is interpreted on the CPU."""

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda import linear
from engine.execution.cuda.kernels import product
from engine.models.causal_lm import Shard
from engine.models.experts import experts_of
from engine.models.shards import QuantizedRowLinear
from tests.engine.models.test_experts import FAMILIES
from tests.engine.models.test_quantization import layer_of
from tests.engine.tiny import EXPERTS, SIZES


@pytest.fixture
def multiplied(monkeypatch):
    """The numbers of rows that the kernel has multiplied."""
    counts, multiply = [], product.multiply
    monkeypatch.setattr(
        product, "multiply", lambda rows, *rest, **more: counts.append(len(rows)) or multiply(rows, *rest, **more)
    )
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda _: None)
    return counts


def test_every_linear_layer_is_replaced_and_cublas_is_asked_for_many_rows(multiplied, monkeypatch):
    module = nn.Sequential(nn.Linear(128, 16, bias=False), nn.Sequential(nn.Linear(16, 32))).half()
    monkeypatch.setattr(linear, "cublas_agrees", lambda *_: True)
    monkeypatch.setattr(linear, "MAX_KERNEL_ROWS", 8)
    expected = module(x := torch.randn(1, 9, 128, dtype=torch.float16))
    linear.make_invariant(module, torch.float16)
    assert not any(type(layer) is nn.Linear for layer in module.modules())
    with torch.inference_mode():
        torch.testing.assert_close(module(x), expected, atol=0.02, rtol=0)
        assert multiplied == []
        torch.testing.assert_close(module(x[:, :5]), expected[:, :5], atol=0.02, rtol=0)
    assert multiplied == [5, 5]


@pytest.mark.parametrize(
    ("count", "uses_kernel"), [(linear.MAX_KERNEL_ROWS, True), (linear.MAX_KERNEL_ROWS + 1, False)]
)
def test_cublas_is_asked_only_for_more_rows_than_the_kernel_takes(count, uses_kernel, monkeypatch):
    assert min(linear._CHECKED_ROWS) > linear.MAX_KERNEL_ROWS
    multiplied = []
    monkeypatch.setattr(
        product, "multiply", lambda rows, weight, _, **options: multiplied.append(len(rows)) or rows @ weight.T
    )
    rows, weight = torch.randn(count, 16), torch.randn(8, 16)
    torch.ops.paceline.invariant_linear(rows, weight, None, None, 1, True)
    assert multiplied == ([count] if uses_kernel else [])


@pytest.mark.parametrize(("num_bits", "groups"), [(8, 1), (4, 4)])
def test_quantised_layers_are_multiplied_by_the_same_product_for_any_number_of_rows(num_bits, groups, multiplied):
    layer, weight = layer_of(num_bits, groups=groups, outputs=40, inputs=128)
    module = nn.Sequential(layer.half())
    linear.make_invariant(module, torch.float16)
    x = torch.randn(1, 70, 128, dtype=torch.float16)
    with torch.inference_mode():
        result = module(x)
    torch.testing.assert_close(result.float(), x.float() @ weight.T + layer.bias.float(), atol=2.0, rtol=0.01)
    assert multiplied == [70]
    linear.make_invariant(module, torch.float16)
    assert module[0].values is layer.values, "a thinned model shares the layer"


@pytest.mark.parametrize("is_quantised", [False, True])
def test_only_the_products_of_few_rows_split_and_only_without_invariance(is_quantised, monkeypatch):
    splits = []

    def multiply(rows, weight, bias, *, out_dtype, num_splits, scales):
        splits.append(num_splits)
        return rows.new_empty(len(rows), len(weight))

    monkeypatch.setattr(product, "multiply", multiply)
    monkeypatch.setattr(linear, "cublas_agrees", lambda *_: False)
    monkeypatch.setattr(linear, "sum_in_order", lambda: splits.append("in order"))
    one = layer_of(8, groups=1, outputs=16, inputs=8192)[0].half() if is_quantised else nn.Linear(8192, 16).half()
    for invariant in (True, False):
        module = nn.Sequential(one)
        linear.make_invariant(module, torch.float16, invariant=invariant)
        for count in (linear.MAX_KERNEL_ROWS, linear.MAX_KERNEL_ROWS + 1):
            module(torch.ones(count, 8192, dtype=torch.float16))
    assert splits == ["in order", 1, 1, 8] + [1] * is_quantised, "cuBLAS multiplies many rows if it may"


def test_float32_models_keep_their_layers():
    module = nn.Sequential(nn.Linear(8, 8))
    linear.make_invariant(module, torch.float32)
    assert type(module[0]) is nn.Linear


def test_a_ranks_quantised_inputs_are_multiplied_to_float32_before_the_ranks_are_summed(multiplied):
    layer, weight = layer_of(8, groups=1, outputs=24, inputs=128)
    row = QuantizedRowLinear(layer.values, layer.scales.half(), layer.bias.half())
    summed = []
    row.shard = Shard(0, 2, lambda partial: summed.append(partial) or partial * 2)
    module = nn.Sequential(row)
    linear.make_invariant(module, torch.float16)
    x = torch.randn(70, 128, dtype=torch.float16) / 16
    with torch.inference_mode():
        result = module(x)
        assert torch.equal(module(x[:3]), result[:3])
    assert (multiplied, summed[0].dtype, result.dtype) == ([70, 3], torch.float32, torch.float16)
    torch.testing.assert_close(summed[0], x.float() @ weight.T, rtol=0.001, atol=0.02)
    torch.testing.assert_close(result, (summed[0] * 2).half() + layer.bias.half())


@pytest.mark.parametrize("family", ["GptOss", "DeepseekV3"])
def test_routers_and_experts_are_computed_by_our_products(family, multiplied, monkeypatch):
    """The layer compiles as a whole, and a token's bits do not depend on the others."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | EXPERTS | FAMILIES[family] | {"num_hidden_layers": 2})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval().requires_grad_(False)
    experts = experts_of(model)[0]
    block = next(parent for parent in model.modules() if experts in parent.children())
    x = torch.randn(1, 20, 32).half()
    with torch.inference_mode():
        expected = block(x)
        monkeypatch.setattr(linear, "cublas_agrees", lambda *_: False)
        linear.make_invariant(model, torch.float16)
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=True, backend="aot_eager")
        found = block(x)
        assert 20 in multiplied, "the router's"
        for output in (found, compiled(x)):
            torch.testing.assert_close(
                *((one[0] if type(one) is tuple else one) for one in (output, expected)), rtol=0.02, atol=0.02
            )
