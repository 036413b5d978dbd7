"""A recorder that needs no GPU, ranks in threads, and kernels that cost nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.models.causal_lm import Shard
from engine.models.layers.reducer import alone, is_alone
from tests.engine.tiny import model_of

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.cuda_backend import CudaBackend

ENGINE = EngineConfig(num_speculative_tokens=1, max_num_seqs=2, max_num_batched_tokens=40, max_model_len=64)
SETTINGS = ModelConfig("tiny", compile="auto")


class CallRecorder:
    """Replays a pass by computing it; recording the passes in `full`, counted from 0, fails for lack of memory."""

    def __init__(self, full=(), *, is_warm=False):
        self.full, self.is_warm = full, is_warm
        self.computes = []
        self.num_replays = 0

    def record(self, compute):
        self.computes.append(compute)
        if len(self.computes) - 1 in self.full:
            raise torch.OutOfMemoryError("no memory is left")
        if not self.is_warm:
            with alone():
                compute()

        def replay():
            self.num_replays += 1
            compute()

        return replay

    def close(self):
        self.computes.clear()


class ThreadRank:
    """One of the ranks that run in threads; it keeps the names and sizes of its collectives."""

    def __init__(self, rank, values, barrier):
        self.rank, self.world_size = rank, len(values)
        self._values, self._barrier = values, barrier
        self.calls = []

    def prepare(self, max_tokens, width):
        self._share(("prepare", max_tokens, width), None)

    def sum(self, partial):
        return partial.clone() if is_alone() else sum(self._share(("sum", *partial.shape), partial.clone()))

    def max(self, packed):
        return packed if is_alone() else torch.stack(self._share(("max", *packed.shape), packed.clone())).amax(0)

    def gather(self, part):
        if is_alone():
            return part.repeat(1, self.world_size)
        return torch.cat(self._share(("gather", *part.shape), part.clone()), 1)

    def agree(self, ok):
        return all(self._share(("agree",), ok))

    def close(self):
        self.calls.append(("close",))

    def _share(self, call, value):
        self.calls.append(call)
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def ranks(count):
    """The ranks of a world; one that waits for ten seconds fails."""
    values, barrier = [None] * count, threading.Barrier(count, timeout=10)
    return [ThreadRank(rank, values, barrier) for rank in range(count)]


def on_all(parts, call):
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(call, parts))


def sharded(path, world, recorders, engine=ENGINE):
    """The backends of a model's ranks, loaded at the same time, with a KV cache each."""

    def load(rank):
        model = model_of(path, Shard(rank.rank, rank.world_size, rank))
        backend = CudaBackend(model, SETTINGS, engine, recorder=recorders[rank.rank])
        return backend, backend.allocate_kv(12, engine.block_size)

    loaded = on_all(world, load)
    for rank in world:
        rank.calls.clear()
    return loaded
