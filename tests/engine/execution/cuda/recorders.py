"""A recorder that needs no GPU, ranks in threads, and kernels that cost nothing."""

import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.models.causal_lm import Shard
from engine.models.layers.reducer import alone, is_alone
from tests.engine.ranks import CountingReducer, gloo_reducers, on_ranks
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


class NotingReducer(CountingReducer):
    """Keeps the names and sizes of its collectives."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = []

    def prepare(self, max_tokens, width):
        self.calls.append(("prepare", max_tokens, width))

    def sum(self, partial):
        if not is_alone():
            self.calls.append(("sum", *partial.shape))
        return super().sum(partial)

    def agree(self, ok):
        self.calls.append(("agree",))
        return super().agree(ok)

    def close(self):
        self.calls.append(("close",))


def ranks(count):
    return gloo_reducers(count, NotingReducer)


def sharded(path, world, recorders, engine=ENGINE):
    """The backends of a model's ranks, loaded at the same time, with a KV cache each."""

    def load(rank):
        model = model_of(path, Shard(rank.rank, rank.world_size, rank))
        backend = CudaBackend(model, SETTINGS, engine, recorder=recorders[rank.rank])
        return backend, backend.allocate_kv(12, engine.block_size)

    loaded = on_ranks(load, world)
    for rank in world:
        rank.calls.clear()
    return loaded
