"""The layers that use our product, which is interpreted on the CPU."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda import linear
from engine.execution.cuda.kernels import product
from tests.engine.models.test_quantization import layer_of


@pytest.fixture
def multiplied(monkeypatch):
    """The numbers of rows that the kernel has multiplied."""
    counts, multiply = [], product.multiply
    monkeypatch.setattr(product, "multiply", lambda rows, *rest: counts.append(len(rows)) or multiply(rows, *rest))
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
    monkeypatch.setattr(product, "multiply", lambda rows, weight, _: multiplied.append(len(rows)) or rows @ weight.T)
    rows, weight = torch.randn(count, 16), torch.randn(8, 16)
    torch.ops.paceline.invariant_linear(rows, weight, None, True)
    assert multiplied == ([count] if uses_kernel else [])


def test_cublas_is_told_to_sum_in_float32_and_without_splits(monkeypatch):
    libraries, matmul = [], torch.backends.cuda.matmul
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)
    flags = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {flag: getattr(matmul, flag) for flag in flags}
    try:
        for flag in flags:
            setattr(matmul, flag, (True, True))
        linear.sum_in_order()
        assert libraries == ["cublaslt"]
        assert [
            torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
            torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        ] == [(False, False)] * 2
    finally:
        for flag, value in before.items():
            setattr(matmul, flag, value)


@pytest.mark.parametrize("wrong_count", [None, *linear._CHECKED_ROWS])
def test_cublas_must_give_the_kernels_bits_for_every_number_of_rows(wrong_count, monkeypatch):
    def cublas(rows, weight):
        return rows @ weight.T + (len(rows) == wrong_count)

    monkeypatch.setattr(product, "multiply", lambda rows, weight, _: rows @ weight.T)
    monkeypatch.setattr(torch.nn.functional, "linear", cublas)
    shape = torch.Size((2, 4 if wrong_count is None else wrong_count))  # of its own, because answers are cached
    assert linear.cublas_agrees(shape, torch.float64, torch.device("cpu")) == (wrong_count is None)


@pytest.mark.parametrize(("num_bits", "groups"), [(8, 1), (4, 4)])
def test_quantised_layers_are_multiplied_by_the_same_product(num_bits, groups, multiplied, monkeypatch):
    monkeypatch.setattr(linear, "cublas_agrees", lambda *_: False)
    layer, weight = layer_of(num_bits, groups=groups, outputs=40, inputs=128)
    module = nn.Sequential(layer.half())
    linear.make_invariant(module, torch.float16)
    x = torch.randn(1, 9, 128, dtype=torch.float16)
    with torch.inference_mode():
        result = module(x)
    torch.testing.assert_close(result.float(), x.float() @ weight.T + layer.bias.float(), atol=2.0, rtol=0.01)
    assert multiplied == [9]
    linear.make_invariant(module, torch.float16)
    assert module[0].values is layer.values, "a thinned model shares the layer"
