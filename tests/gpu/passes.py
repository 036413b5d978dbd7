"""Passes: what a forward pass costs by rows, tokens and context, on the device and on the host, and its kernels."""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.config import EngineConfig, ModelConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.execution.kv_tensors import KVTensors
from engine.params import SamplingParams
from engine.protocols import ProposeRow, Request, run_in_process
from tests.gpu.models import random_model

BLOCK_SIZE = 16
CELLS = ((1, 1, 1024), (1, 5, 1024), (8, 1, 1024), (8, 5, 1024), (32, 5, 1024), (1, 1, 8192), (32, 5, 8192))
"""Rows, tokens per row and committed tokens before them."""
PARAMS = {
    "T=0": SamplingParams(temperature=0),
    "T=0.7": SamplingParams(temperature=0.7, seed=1),
    "top-p": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
}
_NUM_TIMED = 10


def bandwidth(device: str, *, num_bytes: int) -> dict[str, Any]:
    """Measure how fast the device's memory is read, and copied (bytes read and written)."""
    source = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    copy = torch.empty_like(source)
    vector = torch.ones(8192, 1, dtype=torch.bfloat16, device=device)
    matrix = source.view(-1, 8192)
    return {
        "copy_gb_per_s": round(2 * num_bytes / median_seconds(lambda: copy.copy_(source), device) / 1e9),
        "matrix_vector_gb_per_s": round(num_bytes / median_seconds(lambda: matrix @ vector, device) / 1e9),
    }


def passes(device: str, shape: str, *, cells: tuple[tuple[int, int, int], ...] = CELLS) -> Iterator[dict[str, Any]]:
    """Yield the time of a pass by rows, tokens and context."""
    backend = make_backend(shape, device, EngineConfig(num_speculative_tokens=8, max_num_seqs=256))
    weight_bytes = sum(p.numel() * p.element_size() for p in backend.model.module.parameters())
    kv = backend.allocate_kv(1 + max(rows * _blocks(context, count) for rows, count, context in cells), BLOCK_SIZE)
    started = time.perf_counter()
    backend.warm_up()
    yield {"cell": f"{shape}: warm-up", "s": round(time.perf_counter() - started, 1)}
    for rows, count, context in cells:
        batch = make_batch(rows, count, context, kv)
        building = median_seconds(lambda r=rows, c=count, n=context: make_batch(r, c, n, kv), device)  # type: ignore[misc]
        device_s, host_s = device_and_host_seconds(backend, batch)
        kv_bytes = 2 * rows * (context + count) * _token_bytes(kv)
        yield {
            "cell": f"{shape}: {rows} x {count} tokens at {context}",
            "pass_ms": round(device_s * 1e3, 3),
            "launch_ms": round(host_s * 1e3, 3),
            "batch_ms": round(building * 1e3, 3),
            "gb_per_s": round((weight_bytes + kv_bytes) / device_s / 1e9),
        }
    yield {"cell": f"{shape}: kernels of 1 x 5 tokens", **kernels(backend, make_batch(1, 5, 1024, kv))}


def chains(device: str, shape: str, *, context: int = 1024, ks: tuple[int, ...] = (4, 8)) -> Iterator[dict[str, Any]]:
    """Yield what a draft of k tokens costs by parameters, and how often the host waits for the device."""
    for k in ks:
        config = EngineConfig(num_blocks=8 * _blocks(context, 512), num_speculative_tokens=k)
        backend = make_backend(shape, device, config, invariant=False)
        drafter = ModelDrafter(DraftModel(backend), config)
        backend.warm_up()
        for (name, params), rows in itertools.product(PARAMS.items(), (1, 8)):
            requests = [Request(f"{name} {i}", list(range(1, context)), context, params) for i in range(rows)]

            def propose(requests: list[Request] = requests, k: int = k, drafter: ModelDrafter = drafter) -> None:
                for request in requests:
                    request.token_ids.extend([5, 6])  # what a round commits
                run_in_process(drafter.propose([ProposeRow(request, k) for request in requests]))

            seconds = median_seconds(propose, device)
            waits = count_waits(propose) if device == "cuda" else 0
            for request in requests:
                drafter.release(request.request_id)
            yield {"cell": f"{shape}: {rows} x {k} drafted, {name}", "ms": round(seconds * 1e3, 3), "waits": waits}


def dtype_of_passes(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def make_backend(shape: str, device: str, engine: EngineConfig, *, invariant: bool = True) -> Any:
    """Return a random model's backend, whose graphs are those of a configuration."""
    model = random_model(shape, torch.device(device), dtype_of_passes(device))
    if device == "cpu":
        return EagerBackend(model)
    from engine.execution.cuda.cuda_backend import CudaBackend

    return CudaBackend(model, ModelConfig(model.info.name, compile="auto"), engine, invariant=invariant)


def make_batch(rows: int, count: int, context: int, kv: KVTensors) -> ForwardBatch:
    """Return a batch of rows that each compute `count` tokens after `context` committed ones."""
    width = _blocks(context, count)
    tables = [range(1 + row * width, 1 + (row + 1) * width) for row in range(rows)]
    return build([ForwardRow([7] * count, context, table, count) for table in tables], kv)


def median_seconds(work: Callable[[], object], device: str) -> float:
    """Return the median time of some work, its end on the device included."""
    times = []
    for i in range(_NUM_TIMED + 3):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        if i >= 3:
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def device_and_host_seconds(backend: Backend, batch: ForwardBatch) -> tuple[float, float]:
    """Return the median time of a pass, and of the host's part: until `run` returns."""
    total, host = [], []
    for i in range(_NUM_TIMED + 3):
        backend.wait()
        started = time.perf_counter()
        backend.run(batch)
        launched = time.perf_counter()
        backend.wait()
        if i >= 3:
            total.append(time.perf_counter() - started)
            host.append(launched - started)
    return sorted(total)[len(total) // 2], sorted(host)[len(host) // 2]


def kernels(backend: Backend, batch: ForwardBatch) -> dict[str, Any]:
    """Return how many kernels a pass launches, and their time altogether."""
    if backend.device.type != "cuda":
        return {"kernels": 0, "kernel_ms": 0.0, "longest": []}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backend.run(batch)
        backend.wait()
    events = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "kernels": sum(event.count for event in events),
        "kernel_ms": round(sum(event.self_device_time_total for event in events) / 1e3, 3),
        "longest": [
            f"{event.self_device_time_total / 1e3:.3f} ms in {event.count} x {event.key[:60]}" for event in events[:8]
        ],
    }


def count_waits(work: Callable[[], object]) -> int:
    """Return how often the host waits for the device, by torch's own count of synchronising operators."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _blocks(context: int, count: int) -> int:
    return -(-(context + count) // BLOCK_SIZE)


def _token_bytes(kv: KVTensors) -> int:
    """Return the bytes of one token's keys (or values) over all layers."""
    return sum(keys[0, 0].numel() * keys.element_size() for keys in kv.keys)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
