"""Packed layers compute what the layers did, whatever their shape, and a row does not depend on the rows beside it."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from engine.execution.cpu.kernels import panel_linear
from engine.execution.cpu.kernels.panel_linear import PanelLinear, pack_layers, packed_copy
from tests.engine.models.layers.test_quantization import layer_of

FORMATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "8 bits": (8, 1),
    "8 bits in groups": (8, 4),
    "4 bits": (4, 1),
    "4 bits in groups": (4, 2),
    "8 bits, zeros": (8, 4, True),
    "4 bits, zeros": (4, 2, True),
}


def linear(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer.requires_grad_(False)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(name, outputs, inputs, *, bias=True):
    """A packed layer of a format, its weights as floats, and its bias."""
    if isinstance(FORMATS[name], torch.dtype):
        weight = random(outputs, inputs).to(FORMATS[name]).float()
        layer = linear(weight, torch.arange(outputs) * 1.0 if bias else None)
    else:
        num_bits, groups, *zeros = FORMATS[name]
        layer, weight = layer_of(num_bits, groups=groups, outputs=outputs, inputs=inputs, bias=bias, zeros=bool(zeros))
    found = PanelLinear.pack(layer)
    assert found is not None
    return found, weight, layer.bias if bias else torch.zeros(outputs)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (65, 60), (300, 132), (64, 1100)])
def test_products_are_right_whatever_their_shape(name, outputs, inputs, library):
    layer, weight, bias = packed(name, outputs, inputs)
    for count in (0, 1, 5, 6, 7, 20, 41):
        x = random(count, inputs, seed=count)
        expected = x.double() @ weight.T.double() + bias.double()
        assert layer(x).shape == expected.shape
        assert torch.allclose(layer(x).double(), expected, rtol=1e-5, atol=1e-5 * float(weight.abs().max()) * inputs)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_kept_bit_for_bit(name, library):
    layer, weight, _ = packed(name, 70, 36, bias=False)
    assert torch.equal(layer(torch.eye(36)), weight.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_new_weights_are_rounded_and_stored_in_place(dtype):
    layer = PanelLinear.pack(linear(random(70, 36).to(dtype).float()))
    panels, weight = layer.panels.data_ptr(), random(70, 36, seed=1)
    layer.refill(weight)
    assert layer.panels.data_ptr() == panels
    assert torch.equal(layer.panels, PanelLinear.pack(linear(weight.to(dtype).float())).panels)


@pytest.mark.parametrize("name", FORMATS)
def test_without_the_library_products_are_the_same_but_for_rounding(name):
    layer, weight, _ = packed(name, 130, 48)
    x = random(3, 48, seed=8)
    products = panel_linear._multiply_panels(x, layer.panels, layer.scales)[:, :130]
    assert torch.allclose(products, x @ weight.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inputs", [64, 1100])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(name, inputs, library):
    layer, _, _ = packed(name, 320, inputs)
    x = random(60, inputs, seed=2)
    whole = layer(x)
    for count in (1, 2, 5, 7, 9, 10, 16, 18, 19, 40):
        for start in range(0, 60 - count, 7):
            assert torch.equal(layer(x[start : start + count]), whole[start : start + count])
    num_threads = torch.get_num_threads()
    try:
        for count in (2, 3):
            torch.set_num_threads(count)
            assert torch.equal(layer(x), whole)
            assert torch.equal(layer(x[:5]), whole[:5])
    finally:
        torch.set_num_threads(num_threads)


def test_what_is_not_finite_stays_so_and_in_its_row(library):
    layer = PanelLinear.pack(linear(torch.ones(70, 40)))
    x = torch.ones(3, 40)
    x[0, 1], x[1, 2] = float("inf"), float("nan")
    found = layer(x)
    assert (found[0] == float("inf")).all()
    assert found[1].isnan().all()
    assert (found[2] == 40).all()


def test_packing_replaces_each_layer_that_can_be_packed_once_and_frees_its_weights():
    quantised, exact = layer_of(4, groups=2)[0], linear(torch.ones(4, 4))
    other, double = linear(torch.full((4, 4), 1 / 3)), linear(random(8, 8).bfloat16().double())
    module = nn.Sequential(exact, nn.Sequential(quantised, exact), other, nn.Embedding(4, 4), double, quantised)
    del exact
    weights = [weakref.ref(module[0].weight), weakref.ref(other.weight)]
    copied = packed_copy(module)
    assert [type(child) for child in module[:4]] == [nn.Linear, nn.Sequential, nn.Linear, nn.Embedding]
    for packed_module in (copied, packed_copy(copied)):
        types = [type(child) for child in packed_module]
        assert types == [PanelLinear, nn.Sequential, nn.Linear, nn.Embedding, nn.Linear, PanelLinear]
        assert packed_module[0].panels is copied[0].panels
        assert [packed_module[index].weight is module[index].weight for index in (2, 3, 4)] == [True] * 3
    assert pack_layers(module) == 2
    assert (module[1][1], module[1][0]) == (module[0], module[5])
    assert [weight() is None for weight in weights] == [True, False]


def test_only_large_layers_that_can_be_packed_are_worth_a_library(monkeypatch):
    def load():
        raise OSError("it is loaded")

    monkeypatch.setattr(panel_linear, "MIN_LARGE", 16)
    pack = partial(panel_linear.pack_large_model, name="a model", load_library=load)
    for layer in (nn.Linear(4, 4), layer_of(4, groups=2)[0]):
        with pytest.raises(OSError, match="it is loaded"):
            pack(nn.Sequential(nn.Embedding(9, 9), nn.Sequential(layer)))
    for layer in (nn.Linear(4, 3), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, device="meta")):
        pack(nn.Sequential(nn.Embedding(9, 9), layer))
