"""Memory: a pair is loaded from files with default settings, and its peak is compared with the plan."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from engine.config import BUNDLED_TARGET
from engine.llm import LLM
from engine.params import SamplingParams
from tests.gpu.models import random_module


def default_pair(device: str, shapes: tuple[str, str], *, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Save a random pair, load it as a user would, and generate 8 texts."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        paths = []
        for shape in shapes:
            paths.append(Path(folder) / shape)
            random_module(shape, torch.device(device), dtype).save_pretrained(paths[-1])
            AutoTokenizer.from_pretrained(BUNDLED_TARGET).save_pretrained(paths[-1])
            if device == "cuda":
                torch.cuda.empty_cache()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        llm = LLM(
            *paths,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            compile="off" if device == "cpu" else "auto",
            speculation="fixed",
        )
        yield {
            "loading_s": round(time.perf_counter() - started, 1),
            "kv_blocks": llm.engine.scheduler.pool.num_blocks,
            **_peak(device),
        }
    params = SamplingParams(temperature=0.7, max_tokens=num_tokens, ignore_eos=True, num_speculative_tokens=4)
    llm.generate([list(range(1, 512))] * 8, params, show_progress=False)
    yield {"requests": 8, **_peak(device)}


def _peak(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "free_gb": round(free / 1e9, 2),
        "total_gb": round(total / 1e9, 2),
    }
