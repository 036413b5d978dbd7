"""A world of two real processes on the loopback address."""

import asyncio
import sys

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from cluster.workers.tensor_parallel import StoreAddress, join_store, join_world, open_store

rank = int(sys.argv[1])
torch.set_num_threads(1)
if rank == 0:
    store, address = open_store("127.0.0.1", 2, 60)
    print(address.port, flush=True)
else:
    store = join_store(StoreAddress("127.0.0.1", int(input())), 2, 60)
shard = join_world(store, rank=rank, world_size=2, device=torch.device("cpu"), host="127.0.0.1", timeout_s=60)
partial = torch.tensor([1.0 + rank, 10.0])
whole = shard.all_reduce(partial)
assert whole is partial
print(whole.tolist(), flush=True)
dist.destroy_process_group()
"""


async def start(rank: int) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, str(rank), stdin=pipe, stdout=pipe)


async def test_two_ranks_sum_their_parts():
    first, second = await start(0), await start(1)
    assert first.stdout is not None
    port = await first.stdout.readline()
    results = await asyncio.gather(first.communicate(), second.communicate(port))
    assert [out.decode().strip() for out, _ in results] == ["[3.0, 20.0]"] * 2
    assert first.returncode == second.returncode == 0
