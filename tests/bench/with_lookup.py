"""transformers' own ways to generate a text with the same models: plain, assisted by a draft, by prompt lookup."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.bench.with_transformers import load
from tests.bench.workload import Workload

NUM_LOOKUP_TOKENS = 10
NUM_ASSISTANT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Continued:
    """The texts of a batch, as token ids, and how long they took."""

    seconds: float
    texts: list[list[int]]
    tokens_per_pass: float = 0.0


class TransformersLookup:
    """Times `generate`. Sampled texts have seeds of their own. Only single texts can be assisted."""

    def __init__(self, workload: Workload) -> None:
        self._model = load(workload, workload.target)
        self._assistant, self._fixed = (load(workload, workload.draft) for _ in range(2))
        fixed = self._fixed.generation_config
        fixed.num_assistant_tokens = NUM_ASSISTANT_TOKENS
        fixed.num_assistant_tokens_schedule = "constant"
        fixed.assistant_confidence_threshold = 0.0
        self._num_tokens = workload.num_tokens

    @torch.inference_mode()
    def run(self, prompts: Sequence[list[int]], temperature: float) -> dict[str, Continued]:
        """Continue the prompts together in each way that can."""
        ways: dict[str, dict[str, Any]] = {"transformers": {}}
        if len(prompts) == 1:
            ways |= {
                "transformers-assisted": {"assistant_model": self._assistant},
                f"transformers-assisted-{NUM_ASSISTANT_TOKENS}": {"assistant_model": self._fixed},
                "transformers-lookup": {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS},
            }
        return {name: self._continue(prompts, temperature, options) for name, options in ways.items()}

    def _continue(self, prompts: Sequence[list[int]], temperature: float, options: dict[str, Any]) -> Continued:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        torch.manual_seed(0)
        longest = max(map(len, prompts))
        device = self._model.device
        input_ids = torch.tensor([[*[0] * (longest - len(ids)), *ids] for ids in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        started = time.perf_counter()
        output = self._model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=self._num_tokens,
            pad_token_id=0,
            **sampling,
            **options,
        )
        seconds = time.perf_counter() - started
        texts = output[:, longest:].tolist()
        assert all(len(text) == self._num_tokens for text in texts)
        return Continued(seconds, texts)
