"""Packed formats by single words, whose numbers can be read."""

import pytest
import torch

from engine.errors import ModelError
from engine.models.layers.packed_formats import FORMATS, unpacked

WORD = torch.tensor([[0x76543210]], dtype=torch.int32)


def test_words_hold_outputs_or_inputs_in_the_order_of_their_format():
    one = torch.ones(1, 8)
    awq = unpacked("x", FORMATS["awq"][0], {"qweight": WORD.expand(2, 1), "scales": one, "qzeros": WORD}, {})
    assert awq.integers.tolist() == [[n - 8] * 2 for n in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert awq.zeros.flatten().tolist() == [n - 8 for n in (0, 4, 1, 5, 2, 6, 3, 7)]
    gptq = {"qweight": WORD.expand(1, 8), "scales": one, "qzeros": WORD | 15, "g_idx": torch.zeros(8)}
    for version, zeros in (("gptq", [0, 2, 3, 4, 5, 6, 7, 8]), ("gptq_v2", [15, 1, 2, 3, 4, 5, 6, 7])):
        layer = unpacked("x", FORMATS["gptq"][0], gptq, {"checkpoint_format": version})
        assert layer.integers[3].tolist() == [n - 8 for n in range(8)]
        assert layer.zeros.flatten().tolist() == [n - 8 for n in zeros]
    packed, _ = FORMATS["compressed-tensors"]
    tensors = {"weight_packed": WORD.expand(8, 1), "weight_scale": one.mT, "weight_shape": torch.tensor([8, 8])}
    assert unpacked("x", packed, tensors, {}).integers[5].tolist() == [n - 8 for n in range(8)]
    with pytest.raises(ModelError, match="x has weights of 2 bits; weights of 4 and 8 bits are served"):
        unpacked("x", packed, tensors | {"weight_shape": torch.tensor([8, 16])}, {})


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
