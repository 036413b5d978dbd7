"""Products of quantised weights are right, whatever their shape, and rows do not depend on each other."""

import pytest
import torch
from torch import nn

from engine.execution.cpu import half_weights, quantized_weights
from engine.execution.cpu.half_weights import has_large_layers, pack_layers
from engine.execution.cpu.quantized_weights import QuantizedPanelLinear
from engine.models.quantized_linear import QuantizedLinear
from tests.engine.models.test_quantized_linear import layer_of

FORMATS = [(8, 1), (8, 4), (4, 1), (4, 2)]


def expected_of(layer, weight, x):
    return x.double() @ weight.T.double() + layer.bias.double()


@pytest.mark.parametrize(("num_bits", "groups"), FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (63, 64), (65, 60), (300, 132), (64, 1100)])
def test_products_are_right_whatever_their_shape(num_bits, groups, outputs, inputs, library):
    layer, weight = layer_of(num_bits, groups=groups, outputs=outputs, inputs=inputs)
    packed = QuantizedPanelLinear(layer)
    for count in (*range(21), 41):
        x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
        expected = expected_of(layer, weight, x)
        assert packed(x).shape == expected.shape
        assert torch.allclose(packed(x).double(), expected, rtol=1e-5, atol=1e-4 * 2**num_bits)


@pytest.mark.parametrize(("num_bits", "groups"), FORMATS)
def test_weights_are_the_integers_times_their_scales_bit_for_bit(num_bits, groups, library):
    layer, weight = layer_of(num_bits, groups=groups, outputs=70, inputs=36, bias=False)
    assert torch.equal(QuantizedPanelLinear(layer)(torch.eye(36)), weight.T)


@pytest.mark.parametrize(("num_bits", "groups"), FORMATS)
def test_without_the_library_products_are_the_same_but_for_rounding(num_bits, groups):
    layer, weight = layer_of(num_bits, groups=groups, outputs=130, inputs=48, bias=False)
    packed = QuantizedPanelLinear(layer)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(8))
    products = quantized_weights._multiply_panels(x, packed.panels, packed.scales)[:, :130]
    assert torch.allclose(products, x @ weight.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_a_row_does_not_depend_on_the_rows_beside_it(num_bits, library):
    layer, _ = layer_of(num_bits, groups=6, outputs=320, inputs=192)
    packed = QuantizedPanelLinear(layer)
    x = torch.randn(60, 192, generator=torch.Generator().manual_seed(2))
    whole = packed(x)
    for count in (1, 2, 5, 7, 9, 10, 16, 18, 19, 40):
        for start in range(0, 60 - count, 7):
            assert torch.equal(packed(x[start : start + count]), whole[start : start + count])


def test_sixteen_bit_inputs_are_summed_in_float32(library):
    layer, weight = layer_of(8, groups=1, outputs=70, inputs=40)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)).bfloat16()
    products = QuantizedPanelLinear(layer)(x)
    assert products.dtype == torch.bfloat16
    assert torch.equal(products, expected_of(layer, weight, x).float().bfloat16())


def test_the_library_computes_the_operator_once_it_is_loaded(library):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("paceline::quantized_linear", "CPU")


@pytest.mark.parametrize("change", ["rows", "panels", "scales", "groups"])
def test_tensors_that_do_not_go_together_are_refused(change, library):
    packed = QuantizedPanelLinear(layer_of(4, groups=2, outputs=70, inputs=40)[0])
    rows, panels, scales = torch.ones(2, 40), packed.panels, packed.scales
    if change == "rows":
        rows = torch.ones(2, 39)
    elif change == "panels":
        panels = panels.view(torch.int8)
    elif change == "scales":
        scales = scales[:1]
    else:
        scales = scales[:, :1].expand(-1, 3, -1).contiguous()
    with pytest.raises(RuntimeError, match="do not go with panels"):
        torch.ops.paceline.quantized_linear(rows, panels, scales)


def test_quantised_layers_are_packed_once_each_and_count_as_large(library, monkeypatch):
    monkeypatch.setattr(half_weights, "MIN_LARGE", 48)
    layer, _ = layer_of(4, groups=2)
    module = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer), "c": nn.Linear(3, 3)})
    assert has_large_layers(module)
    assert pack_layers(module) == 1
    assert type(module["a"]) is QuantizedPanelLinear
    assert module["a"] is module["b"][0]
    assert not any(isinstance(child, QuantizedLinear) for child in module.modules())
    monkeypatch.setattr(half_weights, "MIN_LARGE", 49)
    assert not has_large_layers(nn.Sequential(layer_of(4, groups=2)[0]))
