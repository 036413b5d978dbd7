"""Reducer: sums what the ranks of a tensor-parallel model compute."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Reducer(Protocol):
    """Combines tensors of all ranks. Every rank makes the same calls in the same order and gets the same bits."""

    rank: int
    world_size: int

    def sum(self, partial: Tensor) -> Tensor:
        """Return a new tensor, the sum in rank order."""
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
