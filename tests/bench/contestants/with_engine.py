"""Paceline in this process: the engine behind `LLM`, with stopwatches around its two models."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.config import Execution
from engine.engine import Engine
from engine.llm import LLM, run_in_process
from engine.params import SamplingParams
from engine.stats.drafts import SpeculationStats
from tests.bench.figures import Batch, RoundSplit
from tests.bench.workload import Arm, Cell, Workload
from tests.load.records import Acceptance


class EngineMethod:
    """The engine's own loop, with speculation or without."""

    def __init__(self, workload: Workload, arm: Arm, execution: Execution = "torch") -> None:
        torch.set_num_threads(workload.num_threads)
        self.num_speculative_tokens: int | None = arm.k
        self._num_tokens = workload.num_tokens
        self.engine = load(workload, arm, execution).engine
        self._seconds = Counter[str]()
        self._time(self.engine.verifier, "verify")
        self._time(self.engine.drafter, "propose")

    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        before = acceptance(self.engine.stats)
        rounds: list[tuple[float, float, float]] = []  # without prompts: all, the target's and the draft's seconds

        def observe(round_s: float, has_prompts: bool) -> None:
            if not has_prompts:
                rounds.append((round_s, self._seconds["verify"], self._seconds["propose"]))
            self._seconds.clear()

        started = time.perf_counter()
        texts = generate(self.engine, prompts, cell.temperature, self._num_tokens, observe)
        elapsed = time.perf_counter() - started
        means = [sum(seconds) / len(rounds) for seconds in zip(*rounds, strict=True)]
        split = RoundSplit(len(rounds), *means) if rounds else None
        return Batch(elapsed, acceptance(self.engine.stats) - before, split, texts)

    def close(self) -> None:
        """Nothing was started."""

    def _time(self, owner: Any, name: str) -> None:
        """Count the seconds of a coroutine, which never waits here."""
        original = getattr(owner, name)

        @functools.wraps(original)
        async def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return await original(*arguments)
            finally:
                self._seconds[name] += time.perf_counter() - started  # type: ignore[assignment]

        setattr(owner, name, timed)


def acceptance(stats: SpeculationStats) -> Acceptance:
    return Acceptance(stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)


def load(workload: Workload, arm: Arm, execution: Execution = "torch") -> LLM:
    """Load the engine; it may not keep a prompt's keys and values for the next time, since transformers does not."""
    return LLM(
        workload.target,
        workload.draft,
        num_speculative_tokens=arm.k,
        speculation=arm.speculation,
        dtype=workload.dtype,
        device=workload.device,
        compile=workload.compile,
        enable_prefix_caching=False,
        max_num_seqs=workload.max_num_seqs,
        execution=execution,
    )


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    num_tokens: int,
    observe: Callable[[float, bool], None],
) -> list[list[int]]:
    """Continue prompts as `LLM.generate` does, and return the new tokens.

    Args:
        observe: takes the seconds of each round, and whether it computed prompts.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True)
        engine.add(str(index), prompt, params)
    while engine.has_work:
        started, has_prompts = time.perf_counter(), engine.scheduler.has_prompts
        outputs = run_in_process(engine.step())
        observe(time.perf_counter() - started, has_prompts)
        for output in outputs:
            texts[int(output.request_id)] += output.token_ids
    counts = [len(text) for text in texts]
    if any(count != num_tokens for count in counts):
        raise RuntimeError(f"the engine returned {counts} tokens, {num_tokens} each were asked for")
    return texts
