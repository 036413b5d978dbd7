"""A world of two real processes on the loopback address, and what NCCL is told."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from cluster.workers import tensor_parallel
from cluster.workers.tensor_parallel import find_interface, join_world, open_store

JOIN = """
import sys
from tests.cluster.workers.test_tensor_parallel import sum_parts
from cluster.workers.tensor_parallel import join_store
sum_parts(1, join_store(("127.0.0.1", int(sys.argv[1])), 2, 60))
"""


def sum_parts(rank, store):
    device = torch.device("cpu")
    world = join_world(store, rank=rank, world_size=2, device=device, host="127.0.0.1", timeout_s=60)
    shard = world.shard()
    assert shard.reducer.sum(torch.tensor([1.0 + rank, 10.0])).tolist() == [3.0, 20.0]
    shard.reducer.close()
    assert not distributed.is_initialized()


def test_two_ranks_sum_their_parts():
    store, address = open_store("127.0.0.1", 2, 60)
    with subprocess.Popen([sys.executable, "-c", JOIN, str(address[1])]) as other:
        sum_parts(0, store)
    assert other.returncode == 0


ADDRESSES = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "eth0": ["10.0.0.1", "fe80::fc:ff:fe00:1%eth0", "02:fc:00:00:00:01"],
    "eth1": ["10.0.0.11", "fd00:0:0::2"],
}


@pytest.fixture
def interfaces(monkeypatch):
    entries = {name: [SimpleNamespace(address=text) for text in texts] for name, texts in ADDRESSES.items()}
    monkeypatch.setattr(tensor_parallel.psutil, "net_if_addrs", lambda: entries)


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("127.0.0.1", "lo"),
        ("10.0.0.1", "eth0"),
        ("10.0.0.11", "eth1"),
        ("fd00::2", "eth1"),
        ("fe80::fc:ff:fe00:1%eth0", "eth0"),
        ("10.0.0.2", None),
        ("a-host-name", None),
    ],
)
def test_the_interface_is_the_one_that_has_the_address(address, interface, interfaces):
    assert find_interface(address) == interface


@pytest.mark.parametrize(
    ("device", "index", "before", "after"),
    [("cuda", 0, None, "=eth0"), ("cuda:1", 1, None, "=eth0"), ("cuda", 0, "ib0", "ib0")],
    ids=["without an index", "with one", "an operator's interface"],
)
def test_nccl_is_given_a_device_with_an_index_and_the_interface_of_the_address(
    device, index, before, after, interfaces, monkeypatch
):
    selected, arguments = [], {}
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(
        tensor_parallel.dist, "init_process_group", lambda backend, **options: arguments.update(options, name=backend)
    )
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", before or "")
    if before is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    store = SimpleNamespace(host="10.0.0.1", port=1)
    join_world(store, rank=1, world_size=2, device=torch.device(device), host="10.0.0.1", timeout_s=1)
    assert arguments["name"] == "nccl"
    assert selected == [arguments["device_id"]] == [torch.device("cuda", index)]
    assert os.environ["NCCL_SOCKET_IFNAME"] == after
