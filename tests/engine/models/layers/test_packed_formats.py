"""Packed formats by single words, whose numbers can be read."""

import torch

from engine.models.layers.packed_formats import FORMATS, unpacked

WORD = torch.tensor([[0x76543210]], dtype=torch.int32)


def test_zeros_beside_words_may_be_bytes():
    """As compressed-tensors wrote them before it packed them; they have a sign."""
    packed, _ = FORMATS["compressed-tensors"]
    tensors = {"weight_packed": WORD.expand(8, 1), "weight_scale": torch.ones(8, 1)}
    tensors |= {"weight_shape": torch.tensor([8, 8]), "weight_zero_point": torch.arange(-4, 4).int()[:, None].char()}
    layer = unpacked("x", packed, tensors, {})
    assert layer.zeros.flatten().tolist() == [*range(-4, 4)]
    assert unpacked("x", packed, tensors | {"weight_zero_point": torch.zeros(8, 1).char()}, {}).zeros is None


def test_a_layer_may_have_other_bits_than_its_model():
    """As by GPTQModel's field `dynamic`."""
    tensors = {"qweight": WORD.expand(2, 8), "scales": torch.ones(1, 8), "qzeros": WORD.expand(1, 2)}
    layer = unpacked("x", FORMATS["gptq"][0], tensors | {"g_idx": torch.zeros(8)}, {"bits": 4})
    assert layer.integers[3].tolist() == [byte - 128 for byte in (0x10, 0x32, 0x54, 0x76)] * 2
    assert layer.zeros.flatten().tolist() == [byte - 127 for byte in (0x10, 0x32, 0x54, 0x76)] * 2
