"""The layers that use our product, which is interpreted on the CPU."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda import linear
from engine.execution.cuda.kernels import product
from engine.execution.scratch import CACHE_VARIABLE
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
    multiplied = []
    monkeypatch.setattr(product, "multiply", lambda rows, weight, _: multiplied.append(len(rows)) or rows @ weight.T)
    rows, weight = torch.randn(count, 16), torch.randn(8, 16)
    torch.ops.paceline.invariant_linear(rows, weight, None, True)
    assert multiplied == ([count] if uses_kernel else [])


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


def test_cublas_is_compared_once_on_a_machine_and_with_the_right_rows(monkeypatch, cache, caplog):
    """Our kernel is computed here by `F.linear`, whose result differs for some numbers of rows."""
    seen, wrong = {"kernel": [], "cublas": []}, set()

    def product_of(name, rows, weight):
        seen[name].append(len(rows))
        return rows[:, :1] * weight[:, 0] + (len(rows) in wrong)

    monkeypatch.setattr(product, "multiply", lambda rows, weight, _: product_of("kernel", rows, weight))
    monkeypatch.setattr(linear.F, "linear", lambda rows, weight: product_of("cublas", rows, weight))

    def ask(outputs, *failing):
        wrong.clear()
        wrong.update(failing)
        linear.cublas_agrees.cache_clear()
        return linear.cublas_agrees(torch.Size((outputs, 4)), torch.float32, torch.device("cpu"))

    assert ask(8)
    assert seen == {"kernel": [8192, *linear._CHECKED_ROWS], "cublas": list(linear._CHECKED_ROWS[4:])}
    assert ask(8, 320), "the answer is on disk"
    assert not ask(16, 320)
    assert "unlike itself for [320] rows" in caplog.text
    assert len(list(cache.iterdir())) == 1, "a kernel that differs is asked again"
    monkeypatch.setattr(linear, "_MAX_CHECKED_NUMBERS", 8 * 640)
    assert ask(8, 8192)
    monkeypatch.setattr(torch, "__version__", "another version")
    seen["kernel"].clear()
    (cache / "taken").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(cache / "taken" / "folder"))
    assert ask(8), "there is no folder for answers"
    assert max(seen["kernel"]) == 640, "no more numbers than there is room for"
