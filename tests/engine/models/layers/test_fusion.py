"""Fused projections compute what the separate ones did, bit for bit or within rounding."""

import weakref

import pytest
import torch
from torch import nn

from engine.models.layers.fusion import FusedLinear, FusedSibling, fuse_projections
from engine.models.layers.quantization import QuantizedLinear


class Block(nn.Module):
    """Three projections of one input, of different widths, as in grouped-query attention."""

    def __init__(self, *, bias=True, kind=nn.Linear):
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = kind(8, 4, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)

    def forward(self, x):
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_run_computes_what_its_layers_did(bias):
    torch.manual_seed(0)
    model = nn.ModuleList([Block(bias=bias)]).requires_grad_(False)
    x = torch.randn(3, 8)
    before = model[0](x)
    fuse_projections(model)
    assert isinstance(model[0].q_proj, FusedLinear)
    assert isinstance(model[0].v_proj, FusedSibling)
    for _ in range(2):
        for fused, plain in zip(model[0](x), before, strict=True):
            torch.testing.assert_close(fused, plain)


def fused_block():
    torch.manual_seed(0)
    block = Block().requires_grad_(False)
    fuse_projections(block)
    return block


def test_a_call_may_begin_while_another_is_under_way():
    """As where one thread serves with a module and another checks it."""
    block, (x, other) = fused_block(), torch.randn(2, 3, 8)
    expected, expected_other = block(x), block(other)
    assert torch.equal(block.q_proj(x), expected[0])
    assert torch.equal(block.q_proj(other), expected_other[0])
    assert torch.equal(block.k_proj(x), expected[1])
    assert torch.equal(block.k_proj(other), expected_other[1])
    assert torch.equal(block.v_proj(other), expected_other[2])
    assert torch.equal(block.v_proj(x), expected[2])


def test_a_sibling_computes_its_projection_itself_if_it_comes_first_and_results_go_with_the_input():
    block, x = fused_block(), torch.randn(3, 8)
    keys = block.k_proj(x)
    assert torch.equal(keys, block(x)[1])
    results = [weakref.ref(result) for result in x.fused[1]]
    del x
    assert [result() for result in results] == [None] * 3


def test_layers_that_do_more_than_multiply_or_of_which_only_some_have_a_bias_are_left_alone():
    class Other(nn.Linear):
        pass

    other, block = Block(kind=Other), Block()
    block.v_proj = nn.Linear(8, 4, bias=False)
    fuse_projections(nn.ModuleList([other, block]))
    assert [type(one.q_proj) for one in (other, block)] == [nn.Linear] * 2


def test_packed_layers_of_which_only_some_have_zeros_compute_what_they_did():
    block, x = Block(), torch.randn(3, 8)
    ones = torch.ones(4, 1, dtype=torch.int8)
    for name, size, zeros in (("q_proj", 12, None), ("k_proj", 4, ones), ("v_proj", 4, None)):
        values = torch.randint(-8, 8, (size, 8), dtype=torch.int8)
        setattr(block, name, QuantizedLinear(values, torch.rand(size, 1), None, zeros))
    before = block(x)
    fuse_projections(nn.ModuleList([block]))
    for found, plain in zip(block(x), before, strict=True):
        assert torch.equal(found, plain)
