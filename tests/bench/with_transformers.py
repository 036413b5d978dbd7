"""transformers' own generate, and its assisted generation with the draft as assistant."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from engine.execution.registry import resolve_device, resolve_dtype
from engine.stats import SpeculationStats
from tests.bench.figures import Batch, Timeline
from tests.bench.workload import Cell, Workload


@dataclass(slots=True)
class Clock(BaseStreamer):
    """A streamer that notes when tokens come and how many at once; the first call brings the prompt."""

    arrivals_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        self.arrivals_s.append(time.perf_counter())
        self.counts.append(value.shape[-1] if value.dim() else 1)

    def end(self) -> None:
        """Nothing is held back."""


class TransformersMethod:
    """generate with sdpa attention, left padding and no end-of-text, so that every prompt gets all its tokens."""

    num_speculative_tokens: int | None = None

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(workload.num_threads)
        self._num_tokens = workload.num_tokens
        self._tokenizer = AutoTokenizer.from_pretrained(workload.target)
        self._model = load(workload, workload.target)
        self._options: dict[str, Any] = {}

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        longest = max(len(ids) for ids in prompts)
        input_ids = torch.tensor([[*[0] * (longest - len(ids)), *ids] for ids in prompts], device=self._model.device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=self._model.device)
        sampling = (
            {"do_sample": True, "temperature": cell.temperature, "top_k": 0}
            if cell.temperature
            else {"do_sample": False}
        )
        torch.manual_seed(0)
        clock = Clock()
        started = time.perf_counter()
        output = self._model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=self._num_tokens,
            pad_token_id=0,
            streamer=clock,
            **sampling,
            **self._options,
        )
        new = output[:, longest:]
        self._tokenizer.batch_decode(new)
        elapsed = time.perf_counter() - started
        if new.shape[-1] != self._num_tokens:
            raise RuntimeError(f"generate returned {new.shape[-1]} tokens of {self._num_tokens}")
        timeline = Timeline(started, clock.arrivals_s[1:])
        return Batch(elapsed, [timeline] * len(prompts), self._speculation(clock.counts[1:]))

    def close(self) -> None:
        """Nothing was started."""

    def _speculation(self, counts: Sequence[int]) -> SpeculationStats:
        return SpeculationStats()


class AssistedMethod(TransformersMethod):
    """Assisted generation. Without `num_speculative_tokens` the draft length is transformers' own, by confidence."""

    def __init__(self, workload: Workload, num_speculative_tokens: int | None) -> None:
        super().__init__(workload)
        self.num_speculative_tokens = num_speculative_tokens
        assistant = load(workload, workload.draft)
        if num_speculative_tokens is not None:
            assistant.generation_config.num_assistant_tokens = num_speculative_tokens
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        self._num_draft_tokens = 0
        assistant.register_forward_hook(self._count)
        self._options = {"assistant_model": assistant}

    def _count(self, *_: object) -> None:
        """Count a forward pass of the assistant: it is one draft token."""
        self._num_draft_tokens += 1

    def _speculation(self, counts: Sequence[int]) -> SpeculationStats:
        stats = SpeculationStats(
            num_drafts=len(counts),
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(counts) - len(counts),
        )
        self._num_draft_tokens = 0
        return stats


def load(workload: Workload, path: str) -> Any:
    """Load a model in the dtype the engine would choose."""
    device = resolve_device(workload.device)
    dtype = resolve_dtype(workload.dtype, device)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None
    return model
