"""Bandwidth: how near a model too large for the caches decodes to what the memory gives."""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine.execution.cpu.backend import CpuBackend
from engine.execution.cpu.half_weights import PanelLinear
from engine.execution.eager import EagerBackend
from engine.models.causal_lm import CausalLM
from tests.bench.compare import conditions
from tests.bench.figures import measure
from tests.bench.with_engine import EngineMethod
from tests.bench.workload import Cell, Workload

SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
"""Half a billion parameters."""
NUM_TOKENS = 24
BUFFER_BYTES = 2**30
NUM_READS = 10


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What decoding read, and what a sum over a buffer reads with the same threads.

    Attributes:
        weight_bytes: of the matrices, which every token reads once.
        is_compiled: whether the decode steps were.
    """

    weight_bytes: int
    is_compiled: bool
    tpot_ms: float
    stream_bytes_per_s: float

    @property
    def share(self) -> float:
        return self.weight_bytes / self.tpot_ms * 1e3 / self.stream_bytes_per_s


def bandwidth(workload: Workload, console: Console) -> Bandwidth:
    """Decode with random bfloat16 weights, which a CPU that does not multiply them widens; print how fast they came."""
    with tempfile.TemporaryDirectory() as folder, console.status("making and compiling half a billion parameters"):
        _save(workload.target, Path(folder))
        workload = replace(workload, target=folder, num_tokens=NUM_TOKENS, prompts=workload.prompts[:1])
        method = EngineMethod(replace(workload, compile="off"), 0)  # not in the background, but here:
        backend = method.backend
        assert isinstance(backend, EagerBackend)
        if workload.compile == "auto" and isinstance(backend, CpuBackend):
            backend.compile()
        row = measure("engine-plain", method, workload, Cell(1, 0.0))
        is_compiled = isinstance(backend, CpuBackend) and backend.is_compiled
        found = Bandwidth(_weight_bytes(backend.model), is_compiled, row.tpot_ms, _stream(backend.device))
    console.print(
        f"{'compiled' if found.is_compiled else 'eager'}: {found.weight_bytes / 1e9:.2f} GB of weights per token in "
        f"{found.tpot_ms:.1f} ms: {found.weight_bytes / found.tpot_ms / 1e6:.1f} GB/s; "
        f"reading a buffer: {found.stream_bytes_per_s / 1e9:.1f} GB/s; share {found.share:.0%}"
    )
    console.print(conditions(workload), style="dim")
    return found


def _save(tokenizer: str, folder: Path) -> None:
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=512, bos_token_id=None, eos_token_id=0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _weight_bytes(model: CausalLM) -> int:
    return sum(
        layer.in_features * layer.out_features * (2 if isinstance(layer, PanelLinear) else layer.weight.element_size())
        for layer in model.module.modules()
        if isinstance(layer, PanelLinear | nn.Linear)
    )


def _stream(device: torch.device) -> float:
    """Return the bytes per second of the fastest of some sums over a buffer."""
    buffer = torch.ones(BUFFER_BYTES // 4, device=device)
    times = []
    for _ in range(NUM_READS):
        started = time.perf_counter()
        buffer.sum().item()
        times.append(time.perf_counter() - started)
    return BUFFER_BYTES / min(times)
