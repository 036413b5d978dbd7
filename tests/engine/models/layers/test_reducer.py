"""What ranks do together: the argmax of a vocabulary in slices, and the sum of a row-wise layer."""

import pytest
import torch

from engine.models.layers.reducer import best_over_ranks
from engine.models.shards import RowLinear
from tests.engine.ranks import gloo_reducers, on_ranks

INF, VOCAB = float("inf"), 16
ROWS = {
    "one best": [float(token == 13) for token in range(VOCAB)],
    "ties between slices and in one": [0.0, 0.0, 0.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0, 0.0, 2.0, 0.0, 0.0, 2.0, 0.0, 2.0],
    "all below 0": [-1.0 - (token - 9) ** 2 for token in range(VOCAB)],
    "tiny below 0": [-1e-40] * 5 + [-1e-41] * 11,
    "a zero below zero is as good": [-1.0, -1.0, -0.0, -1.0, 0.0] + [-1.0] * 10 + [0.0],
    "nothing allowed": [-INF] * VOCAB,
    "one allowed": [-INF] * 14 + [-3e38, -INF],
    "the largest": [3e38] * 2 + [INF] * 2 + [3.4e38] * 12,
}


@pytest.fixture(scope="module", params=[2, 4])
def reducers(request):
    return gloo_reducers(request.param)


def test_the_argmax_over_slices_is_the_whole_rows_lowest_one(reducers):
    scores = torch.cat([torch.tensor(list(ROWS.values())), torch.randn(20, VOCAB).round()])
    width = VOCAB // len(reducers)

    def argmax(reducer):
        first = reducer.rank * width
        best, ids = scores[:, first : first + width].max(-1)
        return best_over_ranks(best, ids + first, reducer)

    for ids in on_ranks(argmax, reducers):
        assert torch.equal(ids, scores.argmax(-1))


def test_token_ids_may_be_as_large_as_31_bits_and_rows_none(reducers):
    last = 2**31 - len(reducers)
    ids = on_ranks(
        lambda one: best_over_ranks(torch.ones(3), torch.tensor([last + one.rank] * 3), one).tolist(), reducers
    )
    assert ids == [[last] * 3] * len(reducers)
    assert on_ranks(lambda one: best_over_ranks(torch.ones(0), torch.ones(0).long(), one).shape, reducers)[0] == (0,)


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
