"""transformers' own ways to generate a text with the same models: plain, assisted by a draft, by prompt lookup."""

import time
from typing import Any

import torch

from tests.bench.with_transformers import load
from tests.bench.workload import Workload

NUM_LOOKUP_TOKENS = 10


class TransformersLookup:
    """Times `generate`; sampled texts have seeds of their own."""

    def __init__(self, workload: Workload) -> None:
        self._model, self._assistant = load(workload, workload.target), load(workload, workload.draft)
        self._num_tokens = workload.num_tokens

    @torch.inference_mode()
    def run(self, prompt: list[int], temperature: float) -> dict[str, float]:
        """Return the seconds that each way takes for a text."""
        ways: dict[str, dict[str, Any]] = {
            "transformers": {},
            "transformers-assisted": {"assistant_model": self._assistant},
            "transformers-lookup": {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS},
        }
        return {name: self._seconds(prompt, temperature, options) for name, options in ways.items()}

    def _seconds(self, prompt: list[int], temperature: float, options: dict[str, Any]) -> float:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        torch.manual_seed(0)
        input_ids = torch.tensor([prompt], device=self._model.device)
        started = time.perf_counter()
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=self._num_tokens,
            pad_token_id=0,
            **sampling,
            **options,
        )
        assert output.shape[-1] == len(prompt) + self._num_tokens
        return time.perf_counter() - started
