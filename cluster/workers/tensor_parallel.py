"""The torch.distributed world of the target's ranks: a store on rank 0, NCCL on GPUs, gloo on CPU.

The draft is outside it, and so is the Router. Both the store and gloo listen on the node's own address only. A world
lives as long as its ranks; a rank that is lost takes the world with it, and the group makes a new one.
"""

import socket
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from engine.models.causal_lm import Shard


class StoreAddress(NamedTuple):
    """Where rank 0's store listens."""

    host: str
    port: int


def open_store(host: str, world_size: int, timeout_s: float) -> tuple[TCPStore, StoreAddress]:
    """Open the store of a new world, on a free port of `host` and no other address. Only rank 0 does this."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(world_size)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, StoreAddress(host, port)


def join_store(address: StoreAddress, world_size: int, timeout_s: float) -> TCPStore:
    """Connect to rank 0's store."""
    return TCPStore(
        address.host,
        address.port,
        world_size,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def join_world(
    store: TCPStore, *, rank: int, world_size: int, device: torch.device, host: str, timeout_s: float
) -> Shard:
    """Enter the world and return this rank's shard of the model.

    gloo listens on `host`, this node's own address; a sum waits at most `timeout_s` for the other ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
        )
    else:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, pg_options=options)
    return Shard(rank, world_size, all_reduce)


def leave_world() -> None:
    """Leave the world that this process has entered, if it has."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce(partial: Tensor) -> Tensor:
    """Sum `partial` over the ranks, in place, and return it."""
    dist.all_reduce(partial)
    return partial
