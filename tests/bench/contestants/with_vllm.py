"""vLLM's CPU build, plain and with a greedy or a sampled draft. It lives in an environment of its own (`make vllm`)."""

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.models.loader import resolve_device, resolve_dtype
from tests.bench.figures import Batch
from tests.bench.workload import Cell, Workload
from tests.load.records import Acceptance

PEERS = Path(__file__).parents[3] / ".venv-vllm"
KV_CACHE_GIB = 1
COUNTERS = tuple(f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens"))


def environment(num_threads: int) -> dict[str, str]:
    """Return what its process must be started with.

    In one process, because messages between several would cost more than a small model's step; then vLLM leaves the
    threads to their library. That is Intel's, as vLLM recommends, set as vLLM sets it for processes of its own.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": str(PEERS / "lib" / "libiomp5.so"),
        "OMP_NUM_THREADS": str(num_threads),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


class VLLMMethod:
    """vLLM's engine, compiled and threaded as it is by default, without its prefix cache.

    Its draft is greedy by default; with `draft_sample_method="probabilistic"` it samples, and the target accepts by the
    ratio of probabilities.
    """

    def __init__(self, workload: Workload, num_speculative_tokens: int, draft_sample_method: str = "greedy") -> None:
        vllm: Any = import_module("vllm")  # only there is it installed
        self.num_speculative_tokens: int | None = num_speculative_tokens
        self._num_tokens = workload.num_tokens
        self._num_batches = 0
        self._params = vllm.SamplingParams
        draft = {
            "method": "draft_model",
            "model": workload.draft,
            "num_speculative_tokens": num_speculative_tokens,
            "draft_sample_method": draft_sample_method,
        }
        dtype = resolve_dtype(workload.dtype, resolve_device(workload.device))
        self._llm: Any = vllm.LLM(
            model=workload.target,
            dtype=str(dtype).removeprefix("torch."),
            speculative_config=draft if num_speculative_tokens else None,
            enable_prefix_caching=False,
            disable_log_stats=False,  # its counters of drafts are part of them
            seed=0,
        )

    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        before = self._acceptance()
        started = time.perf_counter()
        self._generate(prompts, cell)
        return Batch(time.perf_counter() - started, self._acceptance() - before)

    def _generate(self, prompts: Sequence[Sequence[int]], cell: Cell) -> None:
        """Continue prompts as `LLM.generate` does."""
        self._num_batches += 1
        engine = self._llm.llm_engine
        counts: dict[str, int] = {}
        for index, prompt in enumerate(prompts):
            settings = {"temperature": cell.temperature, "seed": index, "max_tokens": self._num_tokens}
            params = self._params(**settings, ignore_eos=True)
            engine.add_request(f"{self._num_batches}-{index}", {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
        if list(counts.values()) != [self._num_tokens] * len(prompts):
            raise RuntimeError(f"vLLM returned {counts} tokens, {self._num_tokens} each were asked for")

    def _acceptance(self) -> Acceptance:
        values = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        return Acceptance(*(values.get(name, 0) for name in COUNTERS))

    def close(self) -> None:
        """The process ends with it."""
