"""Ranks as threads of one process: each has a gloo group of its own, and they share a store."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from engine.execution.reduce import RankOrderReducer

_TIMEOUT = timedelta(seconds=60)


class CountingReducer(RankOrderReducer):
    """Notes the shapes of its sums. Ranks that take turns leave it to the others while they wait for them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sums: list[tuple[int, ...]] = []
        self.num_gathers = 0
        self.turn: threading.Lock | None = None

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        self.sums.append(tuple(partial.shape))
        return super().sum(partial)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self.num_gathers += 1
        return super().gather(part)

    def _all_gather(self, part: torch.Tensor) -> torch.Tensor:
        with self._left_to_others():
            return super()._all_gather(part)

    @contextmanager
    def _left_to_others(self) -> Iterator[None]:
        if self.turn is None:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()


def gloo_reducers(world_size: int, kind: type[CountingReducer] = CountingReducer) -> list[Any]:
    store = HashStore()

    def join(rank: int) -> CountingReducer:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        group: Any = ProcessGroupGloo(store, rank, world_size, options)
        return kind(rank, world_size, group, torch.device("cpu"))

    return on_ranks(join, range(world_size))


def on_ranks(work: Callable[[Any], Any], ranks: Sequence[Any]) -> list[Any]:
    """Run a function of each rank in a thread of its own."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def in_turn(work: Callable[[Any], Any], ranks: Sequence[Any], reducers: Sequence[CountingReducer]) -> list[Any]:
    """Run a function of each rank, one at a time until it waits for others: Triton's interpreter knows no threads."""
    turn = threading.Lock()
    for reducer in reducers:
        reducer.turn = turn

    def locked(rank: Any) -> Any:
        with turn:
            return work(rank)

    try:
        return on_ranks(locked, ranks)
    finally:
        for reducer in reducers:
            reducer.turn = None


class AbsentOthers:
    """The reducer of a rank of two that is tried without the other: what it would add is 0."""

    rank, world_size = 0, 2

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial.clone()

    def max(self, packed: torch.Tensor) -> torch.Tensor:
        return packed

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part, part], 1)
