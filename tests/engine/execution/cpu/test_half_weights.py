"""Layers with half weights compute what the float32 layers do, and are only made where nothing is rounded."""

import weakref
import zipfile

import pytest
import torch
from torch import nn

from engine.execution.cpu import half_weights, kernels
from engine.execution.cpu import packages as compilation
from engine.execution.cpu.half_weights import PanelLinear, has_large_layers, pack_layers, packed_copy


@pytest.fixture
def half(library):
    """Pack a layer where nothing is rounded; products are the C++'s."""

    def make(layer):
        module = nn.Sequential(layer)
        pack_layers(module)
        return module[0]

    return make


def linear(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 0.05, 300.0])
def test_weights_saved_in_16_bits_are_kept_bit_for_bit(dtype, size, half):
    if dtype == torch.float16 and size == 1e-6:
        pytest.skip("float16 itself would round them")
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(70, 33, generator=generator) * size).to(dtype).float()
    weight[0, :5] = torch.tensor([0.0, size * 2**-14, -size * 2**-14, size, 2 * size]).to(dtype).float()
    found = half(linear(weight))
    assert type(found) is PanelLinear
    assert torch.equal(found(torch.eye(33)), weight.T)


def test_products_and_biases_are_those_of_the_float32_layer(half):
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(shape, generator=generator).bfloat16().float() for shape in ((40, 24), (40,)))
    x = torch.randn(2, 3, 24, generator=generator)
    layer = linear(weight, bias)
    assert (half(layer)(x) - layer(x)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (63, 64), (65, 63), (300, 130), (4, 200), (64, 1100)])
def test_products_are_right_whatever_their_shape(shape, dtype, half):
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(shape, generator=generator).to(dtype).float()
    layer = half(linear(weight))
    for count in (*range(21), 41):
        x = torch.randn(count, shape[1], generator=generator)
        expected = x.double() @ weight.T.double()
        assert layer(x).shape == expected.shape
        assert torch.allclose(layer(x).double(), expected, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_the_library_products_are_the_same_but_for_rounding(dtype):
    generator = torch.Generator().manual_seed(8)
    layer = linear(torch.randn(130, 50, generator=generator).to(dtype).float())
    panels = PanelLinear.pack(layer).panels
    assert panels.dtype == dtype
    x = torch.randn(3, 50, generator=generator)
    assert torch.allclose(half_weights._multiply_panels(x, panels)[:, :130], layer(x), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [192, 64, 1100])
def test_a_row_does_not_depend_on_the_rows_beside_it(inputs, dtype, half):
    generator = torch.Generator().manual_seed(2)
    layer = half(linear(torch.randn(320, inputs, generator=generator).to(dtype).float()))
    x = torch.randn(60, inputs, generator=generator)
    whole = layer(x)
    for count in (1, 2, 5, 7, 9, 10, 16, 18, 19, 40):
        for start in range(0, 60 - count, 7):
            assert torch.equal(layer(x[start : start + count]), whole[start : start + count])


def test_the_library_computes_the_operator_once_it_is_loaded(library):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("paceline::half_linear", "CPU")


@pytest.mark.parametrize("rows", [(2, 39), (2, 41), (40,)])
def test_rows_that_do_not_go_with_the_weights_are_refused(rows, library):
    panels = PanelLinear.pack(linear(torch.ones(70, 40))).panels
    with pytest.raises(RuntimeError, match="do not go with panels"):
        torch.ops.paceline.half_linear(torch.ones(rows), panels)
    with pytest.raises(RuntimeError, match="half_linear"):
        torch.ops.paceline.half_linear(torch.ones(2, 40), panels.mT.contiguous().mT)


def test_rows_need_not_lie_side_by_side(half):
    generator = torch.Generator().manual_seed(9)
    layer = half(linear(torch.randn(70, 40, generator=generator).bfloat16().float()))
    x = torch.randn(40, 5, generator=generator).T
    assert torch.equal(layer(x), layer(x.contiguous()))


def test_what_is_not_finite_stays_so_and_in_its_row(half):
    layer = half(linear(torch.ones(70, 40)))
    x = torch.ones(3, 40)
    x[0, 1], x[1, 2] = float("inf"), float("nan")
    found = layer(x)
    assert (found[0] == float("inf")).all()
    assert found[1].isnan().all()
    assert (found[2] == 40).all()


def test_weights_of_more_bits_are_left_alone(half):
    generator = torch.Generator().manual_seed(3)
    fine = torch.randn(8, 8, generator=generator)
    for weight in (fine, fine.bfloat16().double()):
        assert type(half(linear(weight))) is nn.Linear


def test_weights_of_any_range_are_kept(half):
    wide = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    wide[0, 0], wide[0, 1], wide[0, 2] = 2.0**-60, 3e38, 1e-40
    wide = wide.bfloat16().float()
    found = half(linear(wide))
    assert type(found) is PanelLinear
    assert torch.equal(found(torch.eye(8)), wide.T)


def test_weights_next_to_zero_are_kept_or_left_alone(half):
    weight = (torch.rand(8, 8, generator=torch.Generator().manual_seed(3)) + 1).bfloat16().float() * 2.0**-126
    assert torch.equal(half(linear(weight))(torch.eye(8)), weight.T)


def test_a_layer_of_zeros_is_a_layer_of_zeros(half):
    assert torch.equal(half(linear(torch.zeros(3, 4)))(torch.ones(2, 4)), torch.zeros(2, 3))


def test_a_packed_copy_leaves_the_module_as_it_was_and_shares_its_tensors():
    module = nn.Sequential(linear(torch.ones(4, 4)), linear(torch.full((4, 4), 1 / 3)), nn.Embedding(4, 4))
    found = packed_copy(module)
    assert [type(child) for child in module] == [nn.Linear, nn.Linear, nn.Embedding]
    assert [type(child) for child in found] == [PanelLinear, nn.Linear, nn.Embedding]
    assert found[1].weight is module[1].weight
    assert found[2].weight is module[2].weight


def test_a_copy_of_a_packed_module_shares_its_packed_weights():
    module = nn.Sequential(linear(torch.ones(4, 4), torch.ones(4)), nn.Linear(4, 4).requires_grad_(False))
    assert pack_layers(module) == 1
    found = packed_copy(module)
    assert found[0].panels is module[0].panels
    assert found[0].bias is module[0].bias
    assert pack_layers(module) == 1  # doing it again changes nothing


def test_float32_weights_are_freed_as_layers_are_packed():
    module = nn.Sequential(linear(torch.ones(4, 4)), nn.Sequential(linear(torch.full((4, 4), 1 / 3))))
    module.append(nn.Sequential(module[0]))
    weights = [weakref.ref(child.weight) for child in (module[0], module[1][0])]
    assert pack_layers(module) == 1
    assert [type(child) for child in (module[0], module[1][0])] == [PanelLinear, nn.Linear]
    assert module[2][0] is module[0]
    assert [weight() is None for weight in weights] == [True, False]


def test_only_large_float32_layers_on_the_cpu_are_worth_a_library(monkeypatch):
    monkeypatch.setattr(half_weights, "MIN_LARGE", 16)
    assert has_large_layers(nn.Sequential(nn.Embedding(9, 9), nn.Sequential(nn.Linear(4, 4))))
    for layer in (nn.Linear(4, 3), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, device="meta")):
        assert not has_large_layers(nn.Sequential(nn.Embedding(9, 9), layer))


def test_threads_change_no_bit(half):
    generator = torch.Generator().manual_seed(4)
    layer = half(linear(torch.randn(1000, 512, generator=generator).bfloat16().float()))
    x = torch.randn(5, 512, generator=generator)
    num_threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(layer(x))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_package_computes_with_the_weights_that_it_is_given(library, tmp_path):
    generator = torch.Generator().manual_seed(5)

    def make():
        weights = [torch.randn(shape, generator=generator).bfloat16().float() for shape in ((300, 24), (24, 300))]
        return packed_copy(nn.Sequential(*(linear(weight, weight[:, 0]) for weight in weights)))

    first, second = make(), make()
    any_rows = ({0: torch.export.Dim.AUTO},)
    compilation._compile(first, (torch.randn(5, 24),), any_rows, tmp_path / "package.pt2")
    with zipfile.ZipFile(tmp_path / "package.pt2") as package:
        sources = [package.read(name).decode() for name in package.namelist() if name.endswith(".wrapper.cpp")]
    assert kernels.symbol(half_weights.SCHEMA) + "(" in sources[0]
    for module in (first, second):
        loader = torch._C._aoti.AOTIModelPackageLoader(str(tmp_path / "package.pt2"), "model", False, 1, -1)
        tensors = dict(module.named_buffers())
        loader.load_constants({name: tensors[name] for name in loader.get_constant_fqns()}, False, True, True)
        for count in (1, 7):
            x = torch.randn(count, 24, generator=generator)
            found = loader.boxed_run([x])[0]
            assert torch.allclose(found, module(x), atol=1e-5)
            # A row does not depend on the rows beside it, nor on how many threads share its products.
            try:
                torch.set_num_threads(2)
                assert torch.equal(loader.boxed_run([x[:1]])[0], found[:1])
            finally:
                torch.set_num_threads(1)
