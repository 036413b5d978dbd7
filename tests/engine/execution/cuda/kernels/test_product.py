"""The Triton product, interpreted on the CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.kernels import product
from engine.models.layers.quantization import pack_nibbles

FORMATS = ["int8", "int8 in groups", "int4", "fp8"]


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]), dtype=torch.float16)


def quantised(name, outer, inner):
    """Values, scales, and the weights that they stand for, as the kernel rounds them."""
    generator = torch.Generator().manual_seed(2)
    scales = torch.rand(outer, 1 if name in ("int8", "fp8") else inner // 32, generator=generator) + 0.1
    if name == "fp8":
        values = (numbers(outer, inner).float() * 50).to(torch.float8_e4m3fn)
        values[0, :5] = torch.tensor([448, -448, 2.0**-9, -(2.0**-9) * 3, 0])
        return values, scales, values.double() * scales
    low = 8 if name == "int4" else 128
    integers = torch.randint(-low, low, (outer, inner), generator=generator, dtype=torch.int8)
    if scales.shape[1] == 1:
        return integers, scales, integers.double() * scales
    weight = integers.half() * scales.half().repeat_interleave(32, 1)
    return pack_nibbles(integers) if name == "int4" else integers, scales.half(), weight.double()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("count", "inner", "outer"), [(1, 256, 48), (5, 130, 33), (70, 128, 64)])
def test_products_are_those_of_torch(count, inner, outer, has_bias):
    rows, weight = torch.randn(count, inner, dtype=torch.float16), torch.randn(outer, inner, dtype=torch.float16)
    bias = torch.randn(outer, dtype=torch.float16) if has_bias else None
    right = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = product.multiply(rows, weight, bias)
    torch.testing.assert_close(found.double(), right, atol=0.05, rtol=0)
    apart = torch.stack([rows, rows], 1)[:, 0]
    assert torch.equal(product.multiply(apart, weight, bias), found), "rows need not lie side by side"


def test_the_inner_dimension_is_summed_in_its_order():
    """In float32, 2^24 + 1 is 2^24: any other order would keep some of the ones."""
    rows, weight = torch.zeros(1, 4 * 512 + 1, dtype=torch.float16), torch.zeros(16, 4 * 512 + 1, dtype=torch.float16)
    rows[0, ::512] = torch.tensor([4096.0, 1.0, 1.0, 1.0, -4096.0])
    weight[:, ::512] = torch.tensor([4096.0, 1.0, 1.0, 1.0, 4096.0])
    assert product.multiply(rows, weight, None).tolist() == [[0.0] * 16]


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_give_the_product_of_the_weights_that_they_stand_for(name):
    for inner, outer in ((256, 40), (160, 33)):
        rows = numbers(5, inner)
        values, scales, weight = quantised(name, outer, inner)
        exact = {"out_dtype": torch.float32, "scales": scales}
        found = product.multiply(rows, values, None, **exact)
        right = rows.double() @ weight.T
        torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-6 * right.abs().max().item())
        biased = product.multiply(rows, values, bias := numbers(outer), scales=scales)
        assert torch.equal(biased, found.half() + bias), "scales come before rounding, and the bias after it"


@pytest.mark.parametrize("name", ["", *FORMATS])
def test_a_row_has_the_same_bits_in_every_tile_of_rows(name, in_order):
    rows = numbers(70, 192)
    values, scales = quantised(name, 40, 192)[:2] if name else (numbers(40, 192), None)
    alone = product.multiply(rows[:1], values, None, scales=scales)
    for count in (16, 17, 70):
        assert torch.equal(product.multiply(rows[:count], values, None, scales=scales)[:1], alone)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("groups", [1, 5])
def test_zeros_are_subtracted_before_weights_are_scaled(name, groups):
    low, generator = 8 if name == "int4" else 128, torch.Generator().manual_seed(2)
    integers = torch.randint(-low, low, (33, 160), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-low, low, (33, groups), generator=generator, dtype=torch.int8)
    scales = (torch.rand(33, groups, generator=generator) + 0.1).half()
    size = 160 // groups
    weight = (integers.half() - zeros.half().repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)
    rows, right = numbers(5, 160), numbers(5, 160).double() @ weight.double().T
    values, options = pack_nibbles(integers) if name == "int4" else integers, {"scales": scales, "zeros": zeros}
    found = product.multiply(rows, values, None, out_dtype=torch.float32, **options)
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-6 * right.abs().max().item())


@pytest.mark.parametrize("group", [48, 256])
def test_groups_may_be_of_any_length(group):
    rows, integers = numbers(3, 2 * group), torch.randint(-128, 128, (20, 2 * group), dtype=torch.int8)
    scales = torch.rand(20, 2) + 0.1
    right = rows.double() @ (integers.half() * scales.half().repeat_interleave(group, 1)).double().T
    found = product.multiply(rows, integers, None, out_dtype=torch.float32, scales=scales)
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-6 * right.abs().max().item())
