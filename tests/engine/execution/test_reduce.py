"""Reducers over gloo groups, ranks in threads; and the calls that symmetric memory gets, on a double of it."""

import functools
from types import SimpleNamespace

import pytest
import torch

from engine.execution import reduce
from engine.execution.reduce import ONE_SHOT_BYTES, RankOrderReducer, SymmetricReducer, make_reducer
from engine.models.layers.reducer import alone, is_alone
from tests.engine.ranks import gloo_reducers, on_ranks

CPU = torch.device("cpu")
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


def test_integers_are_summed_gathered_and_compared(reducers):
    size = len(reducers)
    ids = torch.arange(6).view(3, 2) + 2**40
    assert torch.equal(on_ranks(lambda reducer: reducer.sum(ids), reducers)[-1], ids * size)
    gathered = on_ranks(lambda reducer: reducer.gather(ids + reducer.rank), reducers)
    for result in gathered:
        assert torch.equal(result, torch.cat([ids + rank for rank in range(size)], 1))
    largest = on_ranks(lambda reducer: reducer.max(torch.tensor([-reducer.rank - 1, reducer.rank, 7])), reducers)
    assert [result.tolist() for result in largest] == [[-1, size - 1, 7]] * size
    assert on_ranks(lambda reducer: reducer.gather(torch.empty(0, 4)), reducers)[0].shape == (0, 4 * size)


def test_ranks_agree_only_if_all_do(reducers):
    for failing in (*range(len(reducers)), None):
        agreed = on_ranks(lambda reducer, failing=failing: reducer.agree(reducer.rank != failing), reducers)
        assert agreed == [failing is None] * len(reducers)


@pytest.mark.parametrize("numel", [3, ONE_SHOT_BYTES])
def test_a_rank_that_computes_alone_waits_for_no_other_and_gets_results_of_the_same_shapes(numel, four, monkeypatch):
    symmetric = SymmetricReducer(0, 4, None, CPU)
    symmetric._buffer = torch.empty(numel)
    for reducer in (four[0], symmetric):
        with alone():
            part = torch.ones(numel, 2)
            assert reducer.sum(part).shape == part.shape
            assert reducer.gather(part).shape == (numel, 8)
            assert reducer.max(part.long()).shape == part.shape
    assert not is_alone()


class SymmetricMemory:
    """A double: buffers in a list per rank, whose kernels sum by the ranks' gloo groups; `order` breaks the order."""

    def __init__(self, reducers, monkeypatch, *, has_memory=True, failing=(), order=1):
        self.calls, self.rendezvoused = [], 0
        self.has_memory, self.failing, self.order = has_memory, failing, order
        self.reducers = [self._symmetric(reducer) for reducer in reducers]
        monkeypatch.setattr(reduce, "symm_mem", self)
        kernels = SimpleNamespace(one_shot_all_reduce_copy=self.one_shot, two_shot_all_reduce_=self.two_shot)
        monkeypatch.setattr(torch.ops, "symm_mem", kernels, raising=False)

    def _symmetric(self, reducer):
        gloo = reducer._group
        collectives = {"_allgather_base": gloo._allgather_base, "alltoall_base": gloo.alltoall_base}
        group = SimpleNamespace(group_name=reducer.rank, **collectives)
        return SymmetricReducer(reducer.rank, reducer.world_size, group, CPU)

    def empty(self, numel, *, dtype, device):
        if not self.has_memory:
            raise torch.OutOfMemoryError("no memory")
        return torch.empty(numel, dtype=dtype)

    def rendezvous(self, buffer, name):
        self.rendezvoused += 1
        if name in self.failing:
            raise RuntimeError("no peers")

    def one_shot(self, staged, part, operation, name):
        assert staged.shape == part.shape
        return self._sum(name, staged.copy_(part), operation)

    def two_shot(self, staged, operation, name):
        return staged.copy_(self._sum(name, staged, operation))

    def _sum(self, rank, staged, operation):
        assert operation == "sum"
        assert staged.untyped_storage().data_ptr() == self.reducers[rank]._buffer.data_ptr()
        self.calls.append((rank, tuple(staged.shape)))
        parts = RankOrderReducer._all_gather(self.reducers[rank], staged)
        return functools.reduce(torch.add, parts.unbind()[:: self.order])


def test_a_prepared_symmetric_reducer_sums_in_its_buffer_and_keeps_its_results(four, monkeypatch):
    memory = SymmetricMemory(four, monkeypatch)
    on_ranks(lambda reducer: reducer.prepare(3, ONE_SHOT_BYTES // 8), memory.reducers)
    assert memory.rendezvoused == 4
    for shape in ((2, 7), (3, ONE_SHOT_BYTES // 8)):
        parts = [torch.randn(shape) for _ in range(4)]

        def twice(reducer, parts=parts):
            total = reducer.sum(parts[reducer.rank])
            reducer.sum(torch.zeros_like(total))
            return total

        memory.calls.clear()
        for total in on_ranks(twice, memory.reducers):
            assert torch.equal(total, functools.reduce(torch.add, parts))
        assert sorted(memory.calls) == sorted([(rank, shape) for rank in range(4)] * 2)
    memory.calls.clear()
    others = (torch.ones(4 * ONE_SHOT_BYTES), torch.ones(2, dtype=torch.int64), torch.ones(0))
    for part in others:
        totals = on_ranks(lambda reducer, part=part: reducer.sum(part), memory.reducers)
        assert torch.equal(totals[0], part * 4)
    assert memory.calls == [], "too large, integers, nothing"
    memory.reducers[0].close()
    assert memory.reducers[0]._buffer is None
    for device, world_size, kind in (("cuda:1", 4, SymmetricReducer), ("cuda:1", 3, RankOrderReducer)):
        assert type(make_reducer(1, world_size, None, torch.device(device))) is kind
    assert type(make_reducer(1, 2, None, CPU)) is RankOrderReducer


@pytest.mark.parametrize(
    ("trouble", "reason", "num_rendezvous"),
    [
        ({"has_memory": False}, "no memory", 0),
        ({"failing": [2]}, "no peers", 4),
        ({"order": -1}, "not in rank order", 4),
    ],
)
def test_all_ranks_do_without_symmetric_memory_if_one_must(trouble, reason, num_rendezvous, four, monkeypatch, caplog):
    memory = SymmetricMemory(four, monkeypatch, **trouble)
    on_ranks(lambda reducer: reducer.prepare(2, 64), memory.reducers)
    assert memory.rendezvoused == num_rendezvous
    assert reason in caplog.text
    assert memory.calls == [] or "order" in trouble, "a sum would wait for the rank that failed"
    assert [reducer._buffer for reducer in memory.reducers] == [None] * 4
    memory.calls.clear()
    assert on_ranks(lambda reducer: reducer.sum(torch.ones(2)).tolist(), memory.reducers) == [[4.0, 4.0]] * 4
    assert memory.calls == []
