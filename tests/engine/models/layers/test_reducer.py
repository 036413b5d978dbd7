"""The sum of a row-wise layer over ranks."""

import torch

from engine.models.shards import RowLinear


class Scaling:
    """Stands for a world: its sum is a multiple."""

    def __init__(self, factor):
        self.factor = factor

    def sum(self, partial):
        return partial * self.factor


def test_a_row_linear_sums_in_float32_and_rounds_once_before_its_bias():
    layer = RowLinear(2, 1).to(torch.bfloat16)
    layer.reducer = Scaling(1 + 2.0**-9)
    layer.weight.data[:], layer.bias.data[:] = torch.tensor([[0.5, 0.5]]), 2.0**-8
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    with torch.inference_mode():
        assert layer(x).dtype == torch.bfloat16
        assert layer.reducer.sum(layer.partial(x)).item() == 1 + 2.0**-9
        assert layer(x).item() == 1.0  # each addend is half of the last bit or less; their sum would not be
