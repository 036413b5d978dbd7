"""The reducer over gloo groups, ranks in threads."""

import functools

import pytest
import torch

from engine.execution.reduce import ONE_SHOT_BYTES
from tests.engine.ranks import gloo_reducers, on_ranks

SIZES = {"whole": (3, 5), "the largest whole": (ONE_SHOT_BYTES // 4,), "in slices": (5, ONE_SHOT_BYTES // 16 + 1)}


@pytest.fixture(scope="module", params=[2, 4])
def reducers(request):
    return gloo_reducers(request.param)


@pytest.fixture(scope="module")
def four():
    return gloo_reducers(4)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sums_are_in_rank_order_and_the_same_on_all_ranks(size, reducers):
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(len(reducers))]
    before = [part.clone() for part in parts]
    for total in on_ranks(lambda reducer: reducer.sum(parts[reducer.rank]), reducers):
        assert torch.equal(total, functools.reduce(torch.add, parts))
    assert all(map(torch.equal, parts, before)), "the parts stay as they are"


def test_integers_are_summed(reducers):
    size = len(reducers)
    ids = torch.arange(6).view(3, 2) + 2**40
    assert torch.equal(on_ranks(lambda reducer: reducer.sum(ids), reducers)[-1], ids * size)
