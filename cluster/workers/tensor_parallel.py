"""The torch.distributed world of the target's ranks: a store on rank 0, NCCL on GPUs, gloo on CPU.

All three use the node address that Ray uses, and no other. A lost rank ends the world, and all ranks start again in a
new world.
"""

import os
import socket
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from engine.execution.reduce import World

Address = tuple[str, int]
"""The host and port where rank 0's store listens."""


def open_store(host: str, world_size: int, timeout_s: float) -> tuple[TCPStore, Address]:
    """Open a new world's store on rank 0; it listens on a free port of the address `host`, on no other address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(world_size)
    port = listener.getsockname()[1]
    fd, timeout = listener.detach(), timedelta(seconds=timeout_s)
    store = TCPStore(
        host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd
    )
    return store, (host, port)


def join_store(address: Address, world_size: int, timeout_s: float) -> TCPStore:
    """Connect to rank 0's store."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(*address, world_size, is_master=False, timeout=timeout, wait_for_workers=False)


def join_world(
    store: TCPStore, *, rank: int, world_size: int, device: torch.device, host: str, timeout_s: float
) -> World:
    """Enter the world and return this rank's place in it.

    NCCL or gloo communicates by the node's address `host`; a sum waits `timeout_s` for the other ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # NCCL refuses a device without an index
        torch.cuda.set_device(device)
        interface = find_interface(host)
        if interface is not None:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": exactly this name, not a prefix
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
        )
    else:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, pg_options=options)
    return World(rank, world_size, device, store.host, store.port)


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has an address, or None if none has."""
    ip = _parse_ip(address)
    addresses = [(name, entry.address) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    return next((name for name, text in addresses if ip and ip == _parse_ip(text)), None)


def _parse_ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
