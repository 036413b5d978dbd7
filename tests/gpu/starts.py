"""Starts and ends of a worker: the parts of a start, with cold and warm caches, and the memory after `kill -9`."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoTokenizer

from engine.config import BUNDLED_TARGET, EngineConfig
from tests.gpu.models import random_module
from tests.gpu.passes import BLOCK_SIZE, dtype_of_passes, make_backend, make_batch
from tests.gpu.processes import start

_SHORTEST_S = 0.001


def starts(device: str, shape: str) -> Iterator[dict[str, Any]]:
    """Start a target twice in a process of its own; yield the seconds of its parts, as its log tells them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        random_module(shape, torch.device(device), dtype_of_passes(device)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(BUNDLED_TARGET).save_pretrained(folder)
        if device == "cuda":
            torch.cuda.empty_cache()
        caches = {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        for name in ("first", "second") if device == "cuda" else ("first",):
            command = [sys.executable, "-m", __name__, device, folder]
            started = time.perf_counter()
            result = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"the {name} start failed: {result.stderr[-2000:]}")
            seconds = json.loads(result.stdout.splitlines()[-1])
            yield {"start": name, "total_s": round(time.perf_counter() - started, 1), **seconds}


def kill(device: str, shape: str) -> Iterator[dict[str, Any]]:
    """Kill a process in a pass; yield how long its memory stays taken."""
    free = _free_bytes(device)
    process, ours = start(device, _compute, device, shape)
    ours.recv()
    taken = free - _free_bytes(device)
    started = time.perf_counter()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    ended = time.perf_counter()
    while free - _free_bytes(device) > taken / 100 and time.perf_counter() - ended < 30:
        time.sleep(_SHORTEST_S)
    times = {"ended_s": round(ended - started, 3), "memory_free_s": round(time.perf_counter() - started, 3)}
    yield {"taken_gb": round(taken / 1e9, 2), **times}


def _compute(connection: Connection, device: str, shape: str) -> None:
    backend = make_backend(shape, device, EngineConfig())
    batch = make_batch(8, 5, 64, backend.allocate_kv(100, BLOCK_SIZE))
    backend.run(batch)
    connection.send("computing")
    while True:
        backend.run(batch)


def _free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _load(device: str, folder: str) -> dict[str, float]:
    """Load a target as a worker does; return the seconds of the parts that its log names."""
    from engine.config import ModelConfig
    from engine.drafting.assembly import assemble
    from engine.models.registry import open_model

    seconds: dict[str, float] = {"import_s": round(time.time() - psutil.Process().create_time(), 1)}

    imported = time.perf_counter()

    class Times(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if match := re.search(r"(loaded|compiled|recorded|asked).* in ([\d.]+) s", record.getMessage()):
                seconds[f"{match[1]}_s"] = seconds.get(f"{match[1]}_s", 0.0) + float(match[2])

    logging.getLogger("engine").addHandler(Times())
    logging.getLogger("engine").setLevel(logging.INFO)
    dtype = str(dtype_of_passes(device)).removeprefix("torch.")
    source = open_model(
        ModelConfig(folder, device=device, dtype=dtype, compile="off" if device == "cpu" else "auto")  # type: ignore[arg-type]
    )
    assemble(source, None, EngineConfig(num_blocks=1024)).load_verifier()
    seconds["rest_s"] = round(time.perf_counter() - imported - sum(seconds.values()) + seconds["import_s"], 1)
    return seconds


if __name__ == "__main__":
    print(json.dumps(_load(*sys.argv[1:])))
