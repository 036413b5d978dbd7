"""RankOrderReducer: sums over the ranks of a torch.distributed group, in rank order.

NCCL's and gloo's own sums add in an order that depends on the message's size, so a token's bits would depend on the
batch. Here the backend only moves tensors, and each rank adds them itself, rank 0's first.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.models.causal_lm import Shard

ONE_SHOT_BYTES = 1 << 20
"""Up to this size every rank sums whole tensors; of a larger tensor, each rank sums one slice and shares it."""


class RankOrderReducer:
    """Combines through a process group: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: Any) -> None:
        self._group, self._world_size = group, group.size()

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum in rank order; see `Reducer.sum`."""
        if partial.nbytes <= ONE_SHOT_BYTES:
            return _add(self._all_gather(partial))
        flat = F.pad(partial.flatten(), (0, -partial.numel() % self._world_size))
        slices = torch.empty_like(flat)
        self._group.alltoall_base(slices, flat, [], []).wait()
        total = self._all_gather(_add(slices.view(self._world_size, -1)))
        return total.flatten()[: partial.numel()].view(partial.shape)

    def close(self) -> None:
        """Leave the process group, if this process has joined it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _all_gather(self, part: Tensor) -> Tensor:
        parts = part.new_empty(self._world_size * part.numel())
        # The group's methods keep their names; torch's functions do not.
        self._group._allgather_base(parts, part.flatten()).wait()
        return parts.view(self._world_size, *part.shape)


@dataclass(frozen=True, slots=True)
class World:
    """A rank's place in the torch.distributed world that this process has joined, whose store is at `host`:`port`."""

    rank: int
    size: int
    device: torch.device
    host: str
    port: int

    def shard(self) -> Shard:
        """Return the rank's part of a model, with the reducer of the world."""
        return Shard(self.rank, self.size, RankOrderReducer(dist.group.WORLD))


def _add(parts: Tensor) -> Tensor:
    return functools.reduce(torch.add, parts.unbind())
