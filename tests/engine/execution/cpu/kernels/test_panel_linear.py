"""Packed layers compute what the layers did, whatever their shape, and a row does not depend on the rows beside it."""

import weakref
import zipfile
from functools import partial

import pytest
import torch
from torch import nn

from engine.execution.cpu.compilation import packages as compilation
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
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (63, 64), (65, 60), (300, 132), (64, 1100)])
def test_products_are_right_whatever_their_shape(name, outputs, inputs, library):
    layer, weight, bias = packed(name, outputs, inputs)
    for count in (*range(21), 41):
        x = random(count, inputs, seed=count)
        expected = x.double() @ weight.T.double() + bias.double()
        assert layer(x).shape == expected.shape
        assert torch.allclose(layer(x).double(), expected, rtol=1e-5, atol=1e-5 * float(weight.abs().max()) * inputs)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_kept_bit_for_bit(name, library):
    layer, weight, _ = packed(name, 70, 36, bias=False)
    assert torch.equal(layer(torch.eye(36)), weight.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extreme_16_bit_weights_are_kept_bit_for_bit(dtype, library):
    limits = torch.finfo(dtype)
    extremes = [0.0, limits.tiny, -limits.tiny, limits.smallest_normal * limits.eps, limits.max, limits.min, 2.0**-14]
    weight = random(70, 33).to(dtype)
    weight[0, : len(extremes)] = torch.tensor(extremes, dtype=dtype)
    layer = PanelLinear.pack(linear(weight.float()))
    assert layer.panels.dtype == dtype
    assert torch.equal(layer(torch.eye(33)), weight.float().T)


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


def test_sixteen_bit_inputs_are_summed_in_float32(library):
    layer, weight, bias = packed("8 bits", 70, 40)
    x = random(3, 40, seed=5).bfloat16()
    products = layer(x)
    assert products.dtype == torch.bfloat16
    assert torch.equal(products, (x.double() @ weight.T.double() + bias.double()).float().bfloat16())


def test_the_library_computes_the_operator_once_it_is_loaded(library):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("paceline::panel_linear", "CPU")


REFUSED = {
    "fewer inputs": lambda rows, panels, scales: (rows[:, :-1], panels, scales),
    "more inputs": lambda rows, panels, scales: (torch.ones(2, 41), panels, scales),
    "one row without a dimension": lambda rows, panels, scales: (rows[0], panels, scales),
    "bytes of another format": lambda rows, panels, scales: (rows, panels.view(torch.int8), scales),
    "panels in another order": lambda rows, panels, scales: (rows, panels.mT.contiguous().mT, scales),
    "scales of fewer panels": lambda rows, panels, scales: (rows, panels, scales[:1]),
    "groups of no equal size": lambda rows, panels, scales: (
        rows,
        panels,
        scales[:, :1].expand(-1, 3, -1).contiguous(),
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_tensors_that_do_not_go_together_are_refused(change, library):
    layer, _, _ = packed("4 bits in groups", 70, 40)
    with pytest.raises(RuntimeError, match="do not go with panels"):
        torch.ops.paceline.panel_linear(*REFUSED[change](torch.ones(2, 40), layer.panels, layer.scales))


def test_rows_need_not_lie_side_by_side(library):
    layer, _, _ = packed("bfloat16", 70, 40)
    x = random(40, 5).T
    assert torch.equal(layer(x), layer(x.contiguous()))


def test_what_is_not_finite_stays_so_and_in_its_row(library):
    layer = PanelLinear.pack(linear(torch.ones(70, 40)))
    x = torch.ones(3, 40)
    x[0, 1], x[1, 2] = float("inf"), float("nan")
    found = layer(x)
    assert (found[0] == float("inf")).all()
    assert found[1].isnan().all()
    assert (found[2] == 40).all()


def test_weights_of_more_bits_are_left_alone():
    for weight in (random(8, 8), random(8, 8).bfloat16().double()):
        assert PanelLinear.pack(linear(weight)) is None


def test_a_packed_copy_leaves_the_module_as_it_was_and_shares_its_tensors():
    module = nn.Sequential(linear(torch.ones(4, 4)), linear(torch.full((4, 4), 1 / 3)), nn.Embedding(4, 4))
    found = packed_copy(module)
    assert [type(child) for child in module] == [nn.Linear, nn.Linear, nn.Embedding]
    assert [type(child) for child in found] == [PanelLinear, nn.Linear, nn.Embedding]
    assert found[1].weight is module[1].weight
    assert found[2].weight is module[2].weight
    assert packed_copy(found)[0].panels is found[0].panels


def test_float32_weights_are_freed_as_layers_are_packed():
    module = nn.Sequential(linear(torch.ones(4, 4)), nn.Sequential(linear(torch.full((4, 4), 1 / 3))))
    module.append(nn.Sequential(module[0]))
    weights = [weakref.ref(child.weight) for child in (module[0], module[1][0])]
    assert pack_layers(module) == 1
    assert [type(child) for child in (module[0], module[1][0])] == [PanelLinear, nn.Linear]
    assert module[2][0] is module[0]
    assert [weight() is None for weight in weights] == [True, False]


def test_quantised_layers_are_packed_once_each():
    layer, _ = layer_of(4, groups=2)
    module = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer), "c": nn.Linear(3, 3)})
    assert pack_layers(module) == 1
    assert type(module["a"]) is PanelLinear
    assert module["a"] is module["b"][0]


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_package_computes_with_the_weights_that_it_is_given(library, tmp_path):
    def make(seed):
        weights = [random(*shape, seed=seed).bfloat16().float() for shape in ((300, 24), (24, 300))]
        return packed_copy(nn.Sequential(*(linear(weight, weight[:, 0]) for weight in weights)))

    first, second = make(1), make(2)
    any_rows = ({0: torch.export.Dim.AUTO},)
    compilation._compile(first, (torch.randn(5, 24),), any_rows, tmp_path / "package.pt2")
    with zipfile.ZipFile(tmp_path / "package.pt2") as package:
        sources = [package.read(name).decode() for name in package.namelist() if name.endswith(".wrapper.cpp")]
    assert "aoti_torch_cpu_panel_linear(" in sources[0]
    for module in (first, second):
        loader = torch._C._aoti.AOTIModelPackageLoader(str(tmp_path / "package.pt2"), "model", False, 1, -1)
        tensors = dict(module.named_buffers())
        loader.load_constants({name: tensors[name] for name in loader.get_constant_fqns()}, False, True, True)
        for count in (1, 7):
            x = random(count, 24, seed=count)
            assert torch.allclose(loader.boxed_run([x])[0], module(x), atol=1e-5)
