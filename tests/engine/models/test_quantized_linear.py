"""A quantised layer multiplies by its integers times their scales."""

import pytest
import torch
from torch import nn

from engine.models.quantized_linear import QuantizedLinear, pack_nibbles, unpack_nibbles


def integers(num_bits, shape, seed=0):
    low, high = -(2 ** (num_bits - 1)), 2 ** (num_bits - 1)
    numbers = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    numbers.view(-1)[:2] = torch.tensor([low, high - 1], dtype=torch.int8)
    return numbers


def layer_of(num_bits, *, groups, bias=True, outputs=6, inputs=8, seed=0):
    """A layer, and its weights as floats."""
    numbers = integers(num_bits, (outputs, inputs), seed)
    scales = torch.rand(outputs, groups, generator=torch.Generator().manual_seed(seed + 1)) + 0.1
    weight = numbers * scales.repeat_interleave(inputs // groups, 1)
    layer = QuantizedLinear(
        pack_nibbles(numbers) if num_bits == 4 else numbers, scales, torch.arange(outputs) * 1.0 if bias else None
    )
    return layer, weight


def test_two_numbers_of_four_bits_fit_into_a_byte():
    numbers = torch.arange(-8, 8, dtype=torch.int8).view(2, 8)
    packed = pack_nibbles(numbers)
    assert (packed.dtype, packed.shape) == (torch.uint8, (2, 4))
    assert torch.equal(unpack_nibbles(packed), numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_bits", "groups"), [(8, 1), (8, 4), (4, 1), (4, 2)])
def test_products_are_those_of_the_weights_as_floats(num_bits, groups, dtype):
    layer, weight = layer_of(num_bits, groups=groups)
    assert (layer.in_features, layer.out_features, layer.num_bits) == (8, 6, num_bits)
    layer.bias = layer.bias.to(dtype)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = x.float() @ weight.T + layer.bias
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x).float(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 3.0)


@pytest.mark.parametrize("bias", [True, False])
def test_concatenated_layers_have_the_outputs_of_all(bias):
    layers = [layer_of(4, groups=2, bias=bias, outputs=outputs, seed=outputs)[0] for outputs in (4, 2, 2)]
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    whole = QuantizedLinear.concatenated(layers)
    torch.testing.assert_close(whole(x), torch.cat([layer(x) for layer in layers], -1))


def test_a_layer_takes_the_memory_of_its_integers_and_scales():
    layer, _ = layer_of(4, groups=2, bias=False)
    assert isinstance(layer, nn.Module)
    assert sum(buffer.nbytes for buffer in layer.buffers()) == 6 * 8 // 2 + 6 * 2 * 4
    assert not list(layer.parameters())
