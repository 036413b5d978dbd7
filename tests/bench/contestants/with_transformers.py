"""transformers' own generate, and its assisted generation with the draft as assistant."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from engine.models.loader import resolve_device, resolve_dtype
from tests.bench.figures import Batch
from tests.bench.workload import Cell, Workload
from tests.load.records import Acceptance


class Counts(BaseStreamer, list[int]):
    """A streamer that notes how many tokens come at once; the first call brings the prompt."""

    def put(self, value: Tensor) -> None:
        self.append(value.shape[-1] if value.dim() else 1)

    def end(self) -> None:
        """Nothing is held back."""


class TransformersMethod:
    """generate with sdpa attention."""

    num_speculative_tokens: int | None = None

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(workload.num_threads)
        self._num_tokens = workload.num_tokens
        self._tokenizer = AutoTokenizer.from_pretrained(workload.target)
        self._model = load(workload, workload.target)
        self._options: dict[str, Any] = {}

    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        counts = Counts()
        started = time.perf_counter()
        new = generate(self._model, prompts, cell.temperature, self._num_tokens, streamer=counts, **self._options)
        self._tokenizer.batch_decode(new)
        return Batch(time.perf_counter() - started, self._acceptance(counts[1:]))

    def close(self) -> None:
        """Nothing was started."""

    def _acceptance(self, counts: Sequence[int]) -> Acceptance:
        return Acceptance()


class AssistedMethod(TransformersMethod):
    """Assisted generation, whose draft length is transformers' own, by confidence."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        assistant = load(workload, workload.draft)
        self._num_draft_tokens = 0
        assistant.register_forward_hook(self._count)
        self._options = {"assistant_model": assistant}

    def _count(self, *_: object) -> None:
        """Count a forward pass of the assistant: it is one draft token."""
        self._num_draft_tokens += 1

    def _acceptance(self, counts: Sequence[int]) -> Acceptance:
        drafted, self._num_draft_tokens = self._num_draft_tokens, 0
        return Acceptance(len(counts), drafted, sum(counts) - len(counts))


@torch.inference_mode()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], temperature: float, num_tokens: int, **options: Any
) -> list[list[int]]:
    """Continue the prompts together, each by `num_tokens` tokens, with left padding."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[*[0] * (longest - len(ids)), *ids] for ids in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    torch.manual_seed(0)
    lengths = {"max_new_tokens": num_tokens, "pad_token_id": 0}
    output = model.generate(input_ids, attention_mask=mask, **lengths, **sampling, **options)
    texts: list[list[int]] = output[:, longest:].tolist()
    if len(texts[0]) != num_tokens:
        raise RuntimeError(f"generate returned {len(texts[0])} tokens of {num_tokens}")
    return texts


def load(workload: Workload, path: str) -> Any:
    """Load a model in the dtype the engine would choose; it does not stop at the end of a text."""
    device = resolve_device(workload.device)
    dtype = resolve_dtype(workload.dtype, device)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None
    return model
