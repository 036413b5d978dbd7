"""The model of a group against the engine of this machine: fitted to closed batches, compared under open arrivals.

One thread computes, and times are its CPU seconds: what else runs on the machine does not count, and nobody waits for
the next arrival.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from deployments.config import Autoscaling
from engine.engine import Engine
from engine.llm import run_in_process
from engine.sampling.params import SamplingParams
from tests.bench.arrivals import Arrival
from tests.bench.cluster_simulation import Scenario, simulate
from tests.bench.group_model import GroupCosts
from tests.bench.with_engine import EngineMethod
from tests.bench.workload import Workload

BATCHES = (1, 2, 4, 8)
PROMPT_LENGTHS = (20, 100, 180)
NUM_TURNS = 6
NUM_DRAFTS = 2
CHUNK_TOKENS = 1024
NUM_TOKENS = 64
MAX_NUM_SEQS = 8
NUM_ARRIVALS = 100
LOADS = (0.5, 0.8)
"""Arrivals, as parts of what the group can do at most."""


@dataclass(frozen=True, slots=True)
class Times:
    """What clients see of a run, in seconds, and tokens per second from its first arrival to its end."""

    tokens_per_s: float
    mean_latency_s: float
    p99_latency_s: float


def check(workload: Workload) -> Table:
    """Fit the model to this machine, and compare both under arrivals that neither was fitted to."""
    engine = EngineMethod(replace(workload, num_threads=1), NUM_DRAFTS).engine
    text = [token for prompt in workload.prompts for token in prompt] * 10
    costs = fit(engine, text)
    caption = (
        f"One thread, {NUM_DRAFTS} drafts. Round {costs.round_ms:.2f} ms + {costs.stream_ms:.2f} per stream + "
        f"{costs.prompt_token_ms:.3f} per prompt token, {costs.tokens_per_round:.2f} tokens per round"
    )
    table = Table(title="The model of a group against this machine", caption=caption, caption_justify="left")
    for column in ("load", "figure", "measured", "simulated", "ratio"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for load in LOADS:
        arrivals = poisson(costs, load)
        real, simulated = measure(engine, text, arrivals), predict(costs, arrivals)
        for name in ("tokens_per_s", "mean_latency_s", "p99_latency_s"):
            pair = getattr(real, name), getattr(simulated, name)
            table.add_row(f"{load:.0%}", name, f"{pair[0]:.3g}", f"{pair[1]:.3g}", f"{pair[1] / pair[0]:.2f}")
        table.add_section()
    return table


def fit(engine: Engine, text: Sequence[int]) -> GroupCosts:
    """Return the costs of this machine, from batches of some sizes and from prompts of some lengths."""
    rounds_ms: dict[int, list[float]] = {size: [] for size in BATCHES}
    prompts_ms: dict[int, list[float]] = {length: [] for length in PROMPT_LENGTHS}
    lengths = []
    for turn in range(NUM_TURNS):
        for size in BATCHES:
            prompts = [_slice(text, 100 * turn + 10 * row, 100) for row in range(size)]
            seconds, num_rounds, length = _closed(engine, prompts)
            if turn:  # the first turn warms up
                rounds_ms[size].append(seconds * 1e3 / num_rounds)
                lengths.append(length)
        for num_tokens in PROMPT_LENGTHS:
            _add(engine, "prompt", _slice(text, 50 * turn, num_tokens), 1)
            started = time.thread_time()
            run_in_process(engine.step())
            if turn:
                prompts_ms[num_tokens].append((time.thread_time() - started) * 1e3)
    stream_ms, round_ms = np.polyfit(BATCHES, [np.median(rounds_ms[size]) for size in BATCHES], 1)
    prompt_token_ms, _ = np.polyfit(PROMPT_LENGTHS, [np.median(prompts_ms[length]) for length in PROMPT_LENGTHS], 1)
    return GroupCosts(
        round_ms=float(round_ms),
        stream_ms=float(stream_ms),
        prompt_token_ms=float(prompt_token_ms),
        tokens_per_round=float(np.mean(lengths)),
        chunk_tokens=CHUNK_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
    )


def _closed(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[float, int, float]:
    """Continue a batch until its first stream ends.

    Returns the seconds and the number of rounds after the first tokens, and the tokens per round of a stream.
    """
    for index, prompt in enumerate(prompts):
        _add(engine, str(index), prompt, NUM_TOKENS)
    run_in_process(engine.step())
    started, num_rounds, num_tokens, is_over = time.thread_time(), 0, 0, False
    while not is_over:
        outputs = run_in_process(engine.step())
        num_rounds += 1
        num_tokens += sum(len(output.token_ids) for output in outputs)
        is_over = any(output.finish_reason is not None for output in outputs)
    seconds = time.thread_time() - started
    for index in range(len(prompts)):
        engine.abort(str(index))
    return seconds, num_rounds, num_tokens / num_rounds / len(prompts)


def _add(engine: Engine, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
    engine.add(request_id, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


def _slice(text: Sequence[int], start: int, length: int) -> Sequence[int]:
    return text[start : start + length]


def poisson(
    costs: GroupCosts, load: float, *, num_groups: int = 1, num_arrivals: int = NUM_ARRIVALS, seed: int = 0
) -> list[Arrival]:
    """Return random arrivals at a part of the rate that the groups can serve at most."""
    chance = random.Random(seed)
    full_s = costs.round_s(costs.max_num_seqs, 0) / costs.tokens_per_round / costs.max_num_seqs
    request_s = (NUM_TOKENS * full_s + 100 * costs.prompt_token_ms / 1e3) / num_groups
    now_s, arrivals = 0.0, []
    for _ in range(num_arrivals):
        now_s += chance.expovariate(load / request_s)
        arrivals.append(Arrival(now_s, chance.randint(20, 180), chance.randint(NUM_TOKENS // 2, 3 * NUM_TOKENS // 2)))
    return arrivals


def measure(engine: Engine, text: Sequence[int], arrivals: Sequence[Arrival]) -> Times:
    """Serve the arrivals; the clock shows the CPU seconds of this thread, and jumps where there is no work."""
    coming, running = deque(enumerate(arrivals)), 0
    waiting: deque[tuple[int, Arrival]] = deque()
    ends: dict[int, float] = {}
    skipped_s = -time.thread_time()
    while len(ends) < len(arrivals):
        if not engine.has_work and not waiting:
            skipped_s = max(skipped_s, coming[0][1].time_s - time.thread_time())
        now_s = time.thread_time() + skipped_s
        while coming and coming[0][1].time_s <= now_s:
            waiting.append(coming.popleft())
        while waiting and running < MAX_NUM_SEQS:
            index, arrival = waiting.popleft()
            _add(engine, str(index), _slice(text, 7 * index, arrival.num_prompt_tokens), arrival.num_tokens)
            running += 1
        for output in run_in_process(engine.step()):
            if output.finish_reason is not None:
                ends[int(output.request_id)] = time.thread_time() + skipped_s
                running -= 1
    return _times(arrivals, [ends[index] for index in range(len(arrivals))])


def predict(costs: GroupCosts, arrivals: Sequence[Arrival]) -> Times:
    """Return what the model says of the arrivals."""
    jobs = simulate(Scenario(costs, Autoscaling()), arrivals).jobs
    return _times([job.arrival for job in jobs], [job.finished_s or 0.0 for job in jobs])


def _times(arrivals: Sequence[Arrival], ends_s: Sequence[float]) -> Times:
    latencies = [end_s - arrival.time_s for arrival, end_s in zip(arrivals, ends_s, strict=True)]
    num_tokens = sum(arrival.num_tokens for arrival in arrivals)
    elapsed_s = max(ends_s) - arrivals[0].time_s
    return Times(num_tokens / elapsed_s, float(np.mean(latencies)), float(np.quantile(latencies, 0.99)))
