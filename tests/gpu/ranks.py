"""Sums of NCCL and of symmetric memory on one GPU, captured in a graph, replayed, and ended in order."""

import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from engine.config import EngineConfig
from tests.gpu.kernels import different, graph_seconds
from tests.gpu.processes import start


def ranks(device: str) -> Iterator[dict[str, Any]]:
    for name, work in {"nccl": _nccl, "symmetric memory": _symmetric}.items():
        if device == "cpu":
            yield {"cell": f"{name}, one rank", "skipped": "there is no GPU"}
            continue
        process, ours = start(device, _report, work)
        yield {"cell": f"{name}, one rank", **(ours.recv() if ours.poll(90) else {"error": "it hangs"})}
        process.kill()


def _report(connection: Connection, work: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        reading = work()
    except (ImportError, AttributeError, RuntimeError) as error:
        reading = {"skipped": f"{type(error).__name__}: {error}"}
    if dist.is_initialized():
        dist.destroy_process_group()
    connection.send({**reading, "ended_in_order": True})


def _nccl() -> dict[str, Any]:
    part = torch.randn(5, 8192, device="cuda")
    dist.all_reduce(part)
    return _captured(lambda: dist.all_reduce(part), part, part.clone())


def _symmetric() -> dict[str, Any]:
    from engine.execution.reduce import SymmetricReducer

    reducer = SymmetricReducer(0, 1, dist.group.WORLD, torch.device("cuda", 0))
    reducer.prepare(EngineConfig().max_num_seqs, 8192)
    part, total = torch.randn(5, 8192, device="cuda"), torch.empty(5, 8192, device="cuda")
    reading = _captured(lambda: total.copy_(reducer.sum(part)), total, part)
    return {**reading, "is_symmetric": getattr(reducer, "_buffer", None) is not None}


def _captured(launch: Any, result: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    seconds = graph_seconds(lambda _: launch(), range(20))
    return {"us": round(seconds * 1e6, 1), "different": different(result, expected)}
