"""The Triton product, interpreted on the CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.kernels import product


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("count", "inner", "outer"), [(1, 256, 48), (5, 130, 33), (70, 128, 64)])
def test_products_are_those_of_torch(count, inner, outer, has_bias):
    rows, weight = torch.randn(count, inner, dtype=torch.float16), torch.randn(outer, inner, dtype=torch.float16)
    bias = torch.randn(outer, dtype=torch.float16) if has_bias else None
    right = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = product.multiply(rows, weight, bias)
    torch.testing.assert_close(found.double(), right, atol=0.05, rtol=0)


def test_the_inner_dimension_is_summed_in_its_order():
    """In float32, 2^24 + 1 is 2^24: any other order would keep some of the ones."""
    rows, weight = torch.zeros(1, 4 * 512 + 1, dtype=torch.float16), torch.zeros(16, 4 * 512 + 1, dtype=torch.float16)
    rows[0, ::512] = torch.tensor([4096.0, 1.0, 1.0, 1.0, -4096.0])
    weight[:, ::512] = torch.tensor([4096.0, 1.0, 1.0, 1.0, 4096.0])
    assert product.multiply(rows, weight, None).tolist() == [[0.0] * 16]


def test_rows_that_are_not_contiguous_are_multiplied():
    rows, weight = torch.randn(6, 256, dtype=torch.float16)[::2], torch.randn(32, 256, dtype=torch.float16)
    assert torch.equal(product.multiply(rows, weight, None), product.multiply(rows.contiguous(), weight, None))
