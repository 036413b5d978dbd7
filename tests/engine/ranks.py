"""Ranks as threads of one process: each has a gloo group of its own, and they share a store."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from engine.execution.reduce import RankOrderReducer

_TIMEOUT = timedelta(seconds=60)


class CountingReducer(RankOrderReducer):
    """Notes the shapes of its sums."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.rank = group.rank()
        self.sums: list[tuple[int, ...]] = []

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        self.sums.append(tuple(partial.shape))
        return super().sum(partial)


def gloo_reducers(world_size: int) -> list[Any]:
    store = HashStore()

    def join(rank: int) -> CountingReducer:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        group: Any = ProcessGroupGloo(store, rank, world_size, options)
        return CountingReducer(group)

    return on_ranks(join, range(world_size))


def on_ranks(work: Callable[[Any], Any], ranks: Sequence[Any]) -> list[Any]:
    """Run a function of each rank in a thread of its own."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


class AbsentOthers:
    """The reducer of a rank of two that is tried without the other: what it would add is 0."""

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial.clone()
