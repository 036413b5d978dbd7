"""Ranks on one GPU: the products of a rank's layers, two ranks over gloo, and sums of NCCL and symmetric memory."""

import socket
import tempfile
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.config import EngineConfig, ModelConfig
from engine.execution.batch import ForwardRow, build
from engine.execution.cuda import linear
from engine.execution.cuda.compiled_layers import compile_layers
from engine.execution.cuda.kernels import product
from engine.execution.reduce import make_reducer
from engine.models.causal_lm import CausalLM, Shard
from engine.models.loader import load_model
from engine.models.registry import open_model
from tests.gpu.kernels import different, dtype_of, graph_seconds
from tests.gpu.models import random_module
from tests.gpu.passes import BLOCK_SIZE, backend_of, dtype_of_passes
from tests.gpu.processes import start

PRODUCTS = {"o_proj of 70B over 4 ranks": (8192, 2048), "down_proj of 70B over 4 ranks": (8192, 7168)}
COUNTS = (1, 5, 40, 160)
_GLOO_TOKENS = (1, 5, 40)


def ranks(device: str, *, dry: bool) -> Iterator[dict[str, Any]]:
    for name, shape in PRODUCTS.items():
        yield {"product": name, **products(device, (32, 64) if dry else shape, COUNTS[:2] if dry else COUNTS)}
    yield {"cell": "two ranks over gloo", **two_ranks(device, "tiny" if dry else "8b")}
    for name, work in {"nccl": _nccl, "symmetric memory": _symmetric}.items():
        if device == "cpu":
            yield {"cell": f"{name}, one rank", "skipped": "there is no GPU"}
            continue
        process, ours = start(device, _report, work)
        yield {"cell": f"{name}, one rank", **(ours.recv() if ours.poll(90) else {"error": "it hangs"})}
        process.kill()


def products(device: str, shape: tuple[int, int], counts: tuple[int, ...]) -> dict[str, Any]:
    """Return the time of ours, of cuBLAS without splits and with splits, and how many bits of rows change with more."""
    copies = max(2, int(3e8 / (2 * shape[0] * shape[1])) + 1) if device == "cuda" else 1
    weights = [torch.randn(shape, dtype=dtype_of(device), device=device) for _ in range(copies)]
    rows = torch.randn(counts[-1], shape[1], dtype=dtype_of(device), device=device)
    ways = {"ours": lambda x, w: product.multiply(x, w, None), "cublas_in_order": F.linear, "cublas": F.linear}
    reading: dict[str, Any] = {}
    for name, multiply in ways.items():
        if device == "cuda":
            linear.sum_in_order()
            if name == "cublas":
                torch.backends.cuda.preferred_blas_library("cublas")
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
            timed = [graph_seconds(partial(multiply, rows[:count]), weights) for count in counts]
            reading[f"{name}_us"] = [round(seconds * 1e6, 1) for seconds in timed]
        first = multiply(rows[:1], weights[0])
        reading[f"{name}_different"] = [different(multiply(rows[:count], weights[0])[:1], first) for count in counts]
    return reading


def two_ranks(device: str, shape: str) -> dict[str, Any]:
    """Compare the logits of two halves with those of the whole, and a token's bits beside more tokens."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        random_module(shape, torch.device(device), dtype_of_passes(device)).save_pretrained(folder)
        if device == "cuda":
            torch.cuda.empty_cache()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        started = [start(device, _rank, folder, device, rank, port) for rank in (0, 1)]
        halves = started[0][1].recv() if started[0][1].poll(150) else None
        for process, _ in started:
            process.kill()
        if not isinstance(halves, list):
            return {"skipped": str(halves or "the ranks did not end")}
        whole = _logits(load_model(open_model(_model_config(folder, device))))
    return {
        "error": max(float((half - right).abs().max()) for half, right in zip(halves, whole, strict=True)),
        "different": [different(half[:1], halves[0]) for half in halves],
    }


def _rank(connection: Connection, folder: str, device: str, rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        shard = make_shard(rank, 2, torch.device(device))
        connection.send(_logits(load_model(open_model(_model_config(folder, device)), shard)))
    except (ImportError, RuntimeError) as error:
        connection.send(f"{type(error).__name__}: {error}")
    connection.poll(None)  # until the stage has read everything


def make_shard(rank: int, world_size: int, device: torch.device) -> Shard:
    """Return a rank of the process group."""
    return Shard(rank, world_size, make_reducer(rank, world_size, dist.group.WORLD, device))


def _logits(model: CausalLM) -> list[torch.Tensor]:
    """Return the whole logits of the first tokens of a text in passes over 1, 5 and 40 of them, without graphs."""
    backend = backend_of(model, EngineConfig())
    if model.device.type == "cuda":
        compile_layers(model.module)  # torch's own norms would depend on the number of rows
    kv = backend.allocate_kv(8, BLOCK_SIZE)
    with torch.inference_mode():
        rows = [ForwardRow([*range(3, 3 + count)], 0, range(1, 5), count) for count in _GLOO_TOKENS]
        return [backend.run(build([row], kv)).logits.cpu() for row in rows]


def _model_config(folder: str, device: str) -> ModelConfig:
    return ModelConfig(folder, device=device, dtype=str(dtype_of_passes(device)).removeprefix("torch."))  # type: ignore[arg-type]


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
    """Record 20 sums in a graph, replay it, and drop it before the process group ends."""
    seconds = graph_seconds(lambda _: launch(), range(20))
    return {"us": round(seconds * 1e6, 1), "different": different(result, expected)}
