"""Memory: a pair is loaded from files with default settings, and its peak is compared with the plan."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from engine.config import BUNDLED_TARGET
from engine.llm import LLM
from engine.params import SamplingParams
from tests.gpu.models import random_module


def default_pair(device: str, shapes: tuple[str, str], *, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Save a random pair, load it as a user would, and generate with 1 and 8 requests."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        paths = []
        started = time.perf_counter()
        for shape in shapes:
            paths.append(Path(folder) / shape)
            random_module(shape, torch.device(device), dtype).save_pretrained(paths[-1])
            AutoTokenizer.from_pretrained(BUNDLED_TARGET).save_pretrained(paths[-1])
            if device == "cuda":
                torch.cuda.empty_cache()
        saved = time.perf_counter()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        llm = LLM(
            *paths,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            compile="off" if device == "cpu" else "auto",
            speculation="fixed",
        )
        yield {
            "saving_s": round(saved - started, 1),
            "loading_s": round(time.perf_counter() - saved, 1),
            "kv_blocks": llm.engine.scheduler.pool.num_blocks,
            **_peak(device),
        }
    for num_requests in (1, 8):
        prompts = [list(range(1, 512))] * num_requests
        for k in (0, 4):
            params = SamplingParams(temperature=0.7, max_tokens=num_tokens, ignore_eos=True, num_speculative_tokens=k)
            llm.generate(prompts, replace(params, max_tokens=8), show_progress=False)
            started = time.perf_counter()
            results = llm.generate(prompts, params, show_progress=False)
            seconds = time.perf_counter() - started
            tokens = sum(len(result.outputs[0].token_ids) for result in results)
            yield {"requests": num_requests, "k": k, "tokens_per_s": round(tokens / seconds, 1), **_peak(device)}


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
