"""Reducers over torch.distributed, which sum over ranks in rank order.

NCCL's and gloo's own sums add in an order that depends on the message's size, so a token's bits would depend on the
batch. Here the backend only moves tensors, and each rank adds them itself, rank 0's first.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch import Tensor

from engine.models.causal_lm import Shard
from engine.models.layers.reducer import Reducer, is_alone

ONE_SHOT_BYTES = 1 << 20
"""Up to this size every rank sums whole tensors; of a larger tensor, each rank sums one slice and shares it."""
_SYMMETRIC_SIZES = (2, 4, 8)
"""Numbers of ranks for which torch's kernels for symmetric memory add in rank order."""

logger = logging.getLogger(__name__)


class RankOrderReducer:
    """Combines through a process group: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, rank: int, world_size: int, group: Any, device: torch.device) -> None:
        self.rank, self.world_size = rank, world_size
        self._group, self._device = group, device

    def prepare(self, max_tokens: int, width: int) -> None:
        """Sum a small and a large tensor: NCCL connects ranks at their first messages, which no graph can record."""
        for numel in (1, ONE_SHOT_BYTES // 4 + 1):
            self.sum(torch.zeros(numel, device=self._device))

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum in rank order; see `Reducer.sum`."""
        if partial.nbytes <= ONE_SHOT_BYTES or is_alone():
            return _add(self._all_gather(partial))
        flat = F.pad(partial.flatten(), (0, -partial.numel() % self.world_size))
        slices = torch.empty_like(flat)
        self._group.alltoall_base(slices, flat, [], []).wait()
        total = self._all_gather(_add(slices.view(self.world_size, -1)))
        return total.flatten()[: partial.numel()].view(partial.shape)

    def max(self, packed: Tensor) -> Tensor:
        """Return the element-wise maximum; see `Reducer.max`."""
        return self._all_gather(packed).amax(0)

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts side by side; see `Reducer.gather`."""
        return self._all_gather(part).movedim(0, 1).flatten(1)

    def agree(self, ok: bool) -> bool:
        """Return whether all ranks pass True; see `Reducer.agree`."""
        return not self.max(torch.tensor([not ok], dtype=torch.int64, device=self._device)).any()

    def close(self) -> None:
        """Leave the process group, if this process has joined it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _all_gather(self, part: Tensor) -> Tensor:
        if is_alone():
            return torch.stack([part] * self.world_size)
        parts = part.new_empty(self.world_size * part.numel())
        # The group's methods keep their names; torch's functions do not.
        self._group._allgather_base(parts, part.flatten()).wait()
        return parts.view(self.world_size, *part.shape)


class SymmetricReducer(RankOrderReducer):
    """Sums float32 tensors in the GPUs' symmetric memory, once `prepare` has found that the bits are the same."""

    _buffer: Tensor | None = None

    def prepare(self, max_tokens: int, width: int) -> None:
        """Allocate the buffer; use it if all ranks can, and if its sums of random tensors are in rank order."""
        super().prepare(max_tokens, width)
        problem, size = "", max_tokens * width
        # The ranks agree before each step that needs all of them, so that none waits for a rank that has failed.
        try:
            buffer = symm_mem.empty(size, dtype=torch.float32, device=self._device)
            generator = torch.Generator(self._device).manual_seed(self.rank)
            parts = torch.randn(size, generator=generator, device=self._device)
        except RuntimeError as error:
            problem = str(error)
        if self.agree(not problem):
            try:
                symm_mem.rendezvous(buffer, self._group.group_name)
            except (RuntimeError, AttributeError) as error:
                problem = str(error)
        if self.agree(not problem):
            self._buffer = buffer
            try:
                for part in (parts[: ONE_SHOT_BYTES // 4], parts):
                    if not torch.equal(self.sum(part), super().sum(part)):
                        problem = "sums are not in rank order"
            except (RuntimeError, AttributeError) as error:
                problem = str(error)
        if not self.agree(not problem):
            self._buffer = None
            logger.warning("Ranks sum through NCCL, without symmetric memory: %s", problem or "another rank has none")

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum in rank order; see `Reducer.sum`."""
        buffer = None if is_alone() else self._buffer
        if buffer is None or partial.dtype != torch.float32 or not 0 < partial.numel() <= len(buffer):
            return super().sum(partial)
        name = self._group.group_name
        staged = buffer[: partial.numel()].view(partial.shape)
        if partial.nbytes <= ONE_SHOT_BYTES:
            total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(staged, partial.contiguous(), "sum", name)
            return total
        # Ranks write to each other's buffers once all have begun this sum, so all have cloned the previous sum.
        summed: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(staged.copy_(partial), "sum", name)
        return summed.clone()

    def close(self) -> None:
        """Free the buffer and leave the process group."""
        self._buffer = None
        super().close()


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
        return Shard(self.rank, self.size, make_reducer(self.rank, self.size, dist.group.WORLD, self.device))


def make_reducer(rank: int, world_size: int, group: Any, device: torch.device) -> Reducer:
    """Return the reducer of a process group's device."""
    is_symmetric = device.type == "cuda" and world_size in _SYMMETRIC_SIZES
    return (SymmetricReducer if is_symmetric else RankOrderReducer)(rank, world_size, group, device)


def _add(parts: Tensor) -> Tensor:
    return functools.reduce(torch.add, parts.unbind())
