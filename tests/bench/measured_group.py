"""The model of a group against the engine of this machine: fitted to closed batches, compared under open arrivals."""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from deployments.config import Autoscaling
from engine.engine import Engine
from engine.llm import run_in_process
from engine.sampling.params import SamplingParams
from tests.bench.arrivals import Arrival
from tests.bench.cluster_simulation import Scenario, simulate
from tests.bench.group_model import GroupCosts
from tests.bench.with_engine import EngineMethod, generate
from tests.bench.workload import Workload

BATCHES = (1, 4, 8)
NUM_DRAFTS = 2
CHUNK_TOKENS = 1024
PROMPT_TOKENS = 1200
NUM_TOKENS = 64
MAX_NUM_SEQS = 8
NUM_ARRIVALS = 60
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
    method = EngineMethod(workload, NUM_DRAFTS)
    costs = fit(method, workload)
    caption = (
        f"One process, {NUM_DRAFTS} drafts. Round {costs.round_ms:.1f} ms + {costs.stream_ms:.2f} per stream + "
        f"{costs.prompt_token_ms:.3f} per prompt token, {costs.tokens_per_round:.2f} tokens per round"
    )
    table = Table(title="The model of a group against this machine", caption=caption, caption_justify="left")
    for column in ("load", "figure", "measured", "simulated", "ratio"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for load in LOADS:
        arrivals = poisson(costs, load)
        real, simulated = measure(method.engine, workload, arrivals), predict(costs, arrivals)
        for name in ("tokens_per_s", "mean_latency_s", "p99_latency_s"):
            pair = getattr(real, name), getattr(simulated, name)
            table.add_row(f"{load:.0%}", name, f"{pair[0]:.3g}", f"{pair[1]:.3g}", f"{pair[1] / pair[0]:.2f}")
        table.add_section()
    return table


def fit(method: EngineMethod, workload: Workload) -> GroupCosts:
    """Return the costs of this machine, from batches of some sizes and from one long prompt."""
    rounds: list[tuple[int, float]] = []
    num_rounds = num_tokens = 0
    long_prompt = workload.prompts[0] * (PROMPT_TOKENS // len(workload.prompts[0]) + 1)
    prompt_s: list[float] = []
    for turn in range(4):
        for size in BATCHES:
            prompts = [workload.prompts[(turn * size + row) % len(workload.prompts)] for row in range(size)]
            before, started = method.engine.stats.num_rounds, time.perf_counter()
            timelines = generate(method.engine, prompts, 0.0, NUM_TOKENS)
            first = max(timeline.arrivals_s[0] for timeline in timelines)
            elapsed_s = time.perf_counter() - first
            made = method.engine.stats.num_rounds - before - 1
            if turn:  # the first turn warms up
                rounds.append((size, elapsed_s * 1e3 / made))
                if size == 1:
                    num_rounds, num_tokens = num_rounds + made, num_tokens + NUM_TOKENS - 1
        started = time.perf_counter()
        generate(method.engine, [long_prompt[:PROMPT_TOKENS]], 0.0, 1)
        prompt_s.append(time.perf_counter() - started)
    medians = [float(np.median([ms for batch, ms in rounds if batch == size])) for size in BATCHES]
    stream_ms, round_ms = np.polyfit(BATCHES, medians, 1)
    prompt_ms = float(np.median(prompt_s[1:])) * 1e3 - 2 * round_ms
    return GroupCosts(
        round_ms=float(round_ms),
        stream_ms=float(stream_ms),
        prompt_token_ms=prompt_ms / PROMPT_TOKENS,
        tokens_per_round=num_tokens / num_rounds,
        chunk_tokens=CHUNK_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
    )


def poisson(costs: GroupCosts, load: float, *, seed: int = 0) -> list[Arrival]:
    """Return random arrivals at a part of the rate that the group can serve at most."""
    chance = random.Random(seed)
    full_s = costs.round_s(costs.max_num_seqs, 0) / costs.tokens_per_round / costs.max_num_seqs
    request_s = NUM_TOKENS * full_s + 100 * costs.prompt_token_ms / 1e3
    now_s, arrivals = 0.0, []
    for _ in range(NUM_ARRIVALS):
        now_s += chance.expovariate(load / request_s)
        arrivals.append(Arrival(now_s, chance.randint(20, 180), chance.randint(NUM_TOKENS // 2, 3 * NUM_TOKENS // 2)))
    return arrivals


def measure(engine: Engine, workload: Workload, arrivals: Sequence[Arrival]) -> Times:
    """Serve the arrivals in real time."""
    text = [token for prompt in workload.prompts for token in prompt] * 10
    coming, running = deque(enumerate(arrivals)), 0
    waiting: deque[tuple[int, Arrival]] = deque()
    ends: dict[int, float] = {}
    started = time.perf_counter()
    while len(ends) < len(arrivals):
        now_s = time.perf_counter() - started
        while coming and coming[0][1].time_s <= now_s:
            waiting.append(coming.popleft())
        while waiting and running < MAX_NUM_SEQS:
            index, arrival = waiting.popleft()
            prompt = text[index * 7 : index * 7 + arrival.num_prompt_tokens]
            params = SamplingParams(temperature=0, max_tokens=arrival.num_tokens, ignore_eos=True)
            engine.add(str(index), prompt, params)
            running += 1
        if not engine.has_work:
            time.sleep(max(0.0, coming[0][1].time_s - now_s))
            continue
        for output in run_in_process(engine.step()):
            if output.finish_reason is not None:
                ends[int(output.request_id)] = time.perf_counter() - started
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
