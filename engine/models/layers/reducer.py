"""Reducer: combines what the ranks of a tensor-parallel model compute, and the functions that call it."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

_LOW_BITS = (1 << 32) - 1


class Reducer(Protocol):
    """Combines tensors of all ranks. Every rank makes the same calls in the same order and gets the same bits."""

    rank: int
    world_size: int

    def sum(self, partial: Tensor) -> Tensor:
        """Return a new tensor, the sum in rank order."""
        ...

    def max(self, packed: Tensor) -> Tensor:
        """Return the element-wise maximum of an [n] int64 tensor."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' [n, m] in rank order, [n, world_size * m]."""
        ...

    def close(self) -> None:
        """Leave the ranks' communicator."""
        ...


def sum_output(module: nn.Module, reducer: Reducer, dtype: torch.dtype) -> None:
    """Let a module return its output, or the first of several, summed over the ranks in this number format."""

    def summed(_module: nn.Module, _inputs: object, output: Any) -> Any:
        partial, *others = output if isinstance(output, tuple) else (output,)
        total = reducer.sum(partial.float()).to(dtype)
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
