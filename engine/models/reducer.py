"""Reducer: the sums and choices over the ranks of a tensor-parallel model."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

_thread = threading.local()


class Reducer(Protocol):
    """Communication between the ranks of a model: every rank makes the same calls in the same order."""

    rank: int
    world_size: int

    def prepare(self, max_tokens: int, width: int) -> None:
        """Allocate buffers for sums of [max_tokens, width] at most, on all ranks, before anything is recorded."""
        ...

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over the ranks, in rank order: the same bits on all ranks, at any number of rows."""
        ...

    def max(self, packed: Tensor) -> Tensor:
        """Return the element-wise maximum over the ranks of [n] int64."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Return [n, world_size * m] for the [n, m] of every rank, in rank order."""
        ...

    def agree(self, ok: bool) -> bool:
        """Return whether all ranks say True."""
        ...

    def close(self) -> None:
        """Leave the other ranks, once no graph holds their communicator."""
        ...


@contextmanager
def alone() -> Iterator[None]:
    """Within it, this thread computes without the other ranks; its results are not used.

    Passes that only compile or warm up run so: if one rank fails in the middle of one, no other waits for it.
    """
    _thread.is_alone = True
    try:
        yield
    finally:
        _thread.is_alone = False


def is_alone() -> bool:
    """Return whether this thread leaves out the other ranks."""
    return getattr(_thread, "is_alone", False)
