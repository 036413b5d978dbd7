"""Paceline in this process: the engine behind `LLM`, with stopwatches around its two models."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.config import Speculation
from engine.engine import Engine
from engine.llm import LLM, run_in_process
from engine.protocols import Draft, Drafter, ProposeRow, Verdict, Verifier, VerifyRow
from engine.sampling.params import SamplingParams
from engine.verification.verifier import ModelVerifier
from tests.bench.figures import Batch, RoundSplit, Timeline, since
from tests.bench.workload import Cell, Workload


class TimedDrafter:
    """A drafter whose proposals are timed."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.seconds = 0.0

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        started = time.perf_counter()
        drafts = await self._drafter.propose(rows)
        self.seconds += time.perf_counter() - started
        return drafts

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)


class TimedVerifier:
    """A verifier whose verifications are timed."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.seconds = 0.0

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        started = time.perf_counter()
        verdicts = await self._verifier.verify(rows)
        self.seconds += time.perf_counter() - started
        return verdicts

    def release(self, request_id: str) -> None:
        self._verifier.release(request_id)


class _Rounds:
    """Times of the rounds since it was made."""

    def __init__(self, drafter: TimedDrafter, verifier: TimedVerifier) -> None:
        self._drafter, self._verifier = drafter, verifier
        self._seen = drafter.seconds, verifier.seconds
        self._num_rounds = 0
        self._round_s = self._draft_s = self._target_s = self.all_s = 0.0

    def observe(self, round_s: float, has_prompts: bool) -> None:
        """Take a round that has ended."""
        draft_s, target_s = self._drafter.seconds - self._seen[0], self._verifier.seconds - self._seen[1]
        self._seen = self._drafter.seconds, self._verifier.seconds
        self.all_s += round_s
        if not has_prompts:
            self._num_rounds += 1
            self._round_s += round_s
            self._draft_s += draft_s
            self._target_s += target_s

    def split(self) -> RoundSplit | None:
        """Return the means over the rounds without prompts."""
        count = self._num_rounds
        return (
            RoundSplit(count, self._round_s / count, self._target_s / count, self._draft_s / count) if count else None
        )


class EngineMethod:
    """The engine's own loop, with speculation (k > 0) or without."""

    def __init__(self, workload: Workload, num_speculative_tokens: int, speculation: Speculation = "fixed") -> None:
        torch.set_num_threads(workload.num_threads)
        self.num_speculative_tokens: int | None = num_speculative_tokens
        self._num_tokens = workload.num_tokens
        self.engine = load(workload, num_speculative_tokens, speculation).engine
        assert isinstance(self.engine.verifier, ModelVerifier)
        self.backend = self.engine.verifier.backend
        self.drafter = self.engine.drafter = TimedDrafter(self.engine.drafter)
        self.verifier = self.engine.verifier = TimedVerifier(self.engine.verifier)

    def run(self, prompts: Sequence[Sequence[int]], cell: Cell) -> Batch:
        before = replace(self.engine.stats)
        rounds = _Rounds(self.drafter, self.verifier)
        started = time.perf_counter()
        timelines = generate(
            self.engine,
            prompts,
            cell.temperature,
            self._num_tokens,
            is_last_late=cell.is_last_late,
            observe=rounds.observe,
        )
        elapsed = time.perf_counter() - started
        return Batch(elapsed, timelines, since(before, self.engine.stats), rounds.split(), elapsed - rounds.all_s)

    def close(self) -> None:
        """Nothing was started."""


def load(workload: Workload, num_speculative_tokens: int, speculation: Speculation = "fixed") -> LLM:
    """Load the engine; it may not keep a prompt's keys and values for the next time, since transformers does not."""
    return LLM(
        workload.target,
        workload.draft,
        num_speculative_tokens=num_speculative_tokens,
        speculation=speculation,
        dtype=workload.dtype,
        device=workload.device,
        compile=workload.compile,
        enable_prefix_caching=False,
        max_num_seqs=workload.max_num_seqs,
    )


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    num_tokens: int,
    *,
    is_last_late: bool = False,
    observe: Callable[[float, bool], None] = lambda round_s, has_prompts: None,
) -> list[Timeline]:
    """Continue prompts as `LLM.generate` does, noting when each round's tokens came.

    A late last prompt comes once all others have a token.

    Args:
        observe: takes the seconds of each round, and whether it computed prompts.
    """
    timelines: dict[str, Timeline] = {}
    texts = {str(index): "" for index in range(len(prompts))}
    counts = dict.fromkeys(texts, 0)

    def add(count: int) -> None:
        now = time.perf_counter()
        for index in range(len(timelines), count):
            params = SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True)
            timelines[str(index)] = Timeline(now)
            engine.add(str(index), prompts[index], params)

    add(len(prompts) - is_last_late)
    while engine.has_work:
        started, has_prompts = time.perf_counter(), engine.has_prompts
        outputs = run_in_process(engine.step())
        now = time.perf_counter()
        observe(now - started, has_prompts)
        for output in outputs:
            timelines[output.request_id].arrivals_s.append(now)
            texts[output.request_id] += output.text
            counts[output.request_id] += len(output.token_ids)
        if all(timeline.arrivals_s for timeline in timelines.values()):
            add(len(prompts))
    if any(count != num_tokens for count in counts.values()):
        raise RuntimeError(f"the engine returned {counts} tokens, {num_tokens} each were asked for")
    return list(timelines.values())
