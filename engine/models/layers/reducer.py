"""Reducer: combines what the ranks of a tensor-parallel model compute, and the functions that call it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_LOW_BITS = (1 << 32) - 1

_thread = threading.local()
_reducers: list["Reducer"] = []
"""This process's reducers by key: one in a worker, or one for each rank if ranks are threads."""


class Reducer(Protocol):
    """Combines tensors of all ranks. Every rank makes the same calls in the same order and gets the same bits."""

    rank: int
    world_size: int

    def prepare(self, max_tokens: int, width: int) -> None:
        """Allocate buffers for sums of up to [max_tokens, width], and connect; before a graph is recorded."""
        ...

    def sum(self, partial: Tensor) -> Tensor:
        """Return a new tensor, the sum in rank order; CUDA graphs can record it."""
        ...

    def max(self, packed: Tensor) -> Tensor:
        """Return the element-wise maximum of an [n] int64 tensor."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' [n, m] in rank order, [n, world_size * m]."""
        ...

    def agree(self, ok: bool) -> bool:
        """Return whether all ranks pass True; the host waits for the device."""
        ...

    def close(self) -> None:
        """Free the buffers and leave the ranks' communicator, which no CUDA graph may use any more."""
        ...


@contextmanager
def alone() -> Iterator[None]:
    """Let this thread compute without other ranks, to compile or warm up; then no rank waits for a rank that fails."""
    _thread.is_alone = True
    try:
        yield
    finally:
        _thread.is_alone = False


def is_alone() -> bool:
    """Return whether this thread leaves out the other ranks."""
    return getattr(_thread, "is_alone", False)


def register(reducer: Reducer) -> int:
    """Return the key by which `sum_over_ranks` finds a reducer."""
    if reducer not in _reducers:
        _reducers.append(reducer)
    return _reducers.index(reducer)


@torch.library.custom_op("paceline::sum_over_ranks", mutates_args=())
def sum_over_ranks(partial: Tensor, key: int) -> Tensor:
    """Sum a tensor by the reducer of a key; one opaque operator, so that compilers can trace layers that call it."""
    return _reducers[key].sum(partial)


@sum_over_ranks.register_fake
def _(partial: Tensor, _key: int) -> Tensor:
    return torch.empty_like(partial)


def sum_output(module: nn.Module, reducer: Reducer, dtype: torch.dtype) -> None:
    """Let a module return its output, or the first of several, summed over the ranks in this number format."""
    key = register(reducer)

    def summed(_module: nn.Module, _inputs: object, output: Any) -> Any:
        partial, *others = output if isinstance(output, tuple) else (output,)
        total = sum_over_ranks(partial.float(), key).to(dtype)
        return (total, *others) if isinstance(output, tuple) else total

    module.register_forward_hook(summed)


def best_over_ranks(scores: Tensor, ids: Tensor, reducer: Reducer) -> Tensor:
    """Return the ids with the highest scores of all ranks, [n] int64; the lowest of equals, as `argmax`.

    scores: [n] float32 this rank's highest; ids: [n] int64 their token ids.
    """
    bits = scores.add(0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # ascends with the score, also below 0
    packed = (ordered.long() << 32) + (~ids & _LOW_BITS)
    return ~reducer.max(packed) & _LOW_BITS
