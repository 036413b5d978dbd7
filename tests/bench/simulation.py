"""Simulation: the real engine, control and run-ahead code over models that cost virtual time, for hardware we lack.

What is not real: the two models and the wires. The models read their context out of the KV cache through the batch's
own masks, as any model does, and agree with a chosen probability.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.config import EngineConfig, Speculation
from engine.engine import Engine
from engine.execution.batch import ForwardBatch
from engine.llm import run_in_process
from engine.sampling.params import SamplingParams
from tests.bench.virtual_time import Delays, Place, virtual_engine
from tests.fakes import ContextModel

NUM_STATES = 4001
VOCAB_SIZE = 48
PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plane:
    """The time of a pass, in milliseconds: a constant, for each row, and for each token."""

    pass_ms: float
    row_ms: float = 0.0
    token_ms: float = 0.0

    def __call__(self, batch: ForwardBatch) -> float:
        """Return the seconds that a pass over a batch takes."""
        num_rows = sum(group.rows for group in batch.paged.groups)
        return (self.pass_ms + self.row_ms * num_rows + self.token_ms * len(batch.token_ids)) / 1e3


@dataclass(frozen=True, slots=True)
class Costs:
    """What a machine and a pair of models take; times in milliseconds.

    Attributes:
        target, draft: their passes.
        network_ms: one way between the Router and a worker; 0 in one process.
        overhead_ms: what a round spends outside both models.
        acceptance: P(a draft token is accepted | those before it were), by position; the last one goes on.
        rank_exponent: a token that was not drafted is beyond the F next candidates with probability F^-exponent.
    """

    target: Plane
    draft: Plane
    network_ms: float
    overhead_ms: float
    acceptance: float
    rank_exponent: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run made."""

    tokens_per_s: float
    mean_acceptance_length: float
    hit_rate: float | None
    mean_draft_length: float


def simulate(
    costs: Costs,
    place: Place,
    *,
    num_streams: int,
    num_speculative_tokens: int,
    speculation: Speculation,
    num_tokens: int = 512,
    num_requests: int = 2,
) -> Outcome:
    """Run so many greedy streams, each of a few requests in a row, and return what came of it."""
    config = EngineConfig(
        num_speculative_tokens=num_speculative_tokens,
        speculation=speculation,
        max_num_seqs=num_streams,
        num_blocks=num_streams * (num_tokens // 16 + 4) * 4,
        enable_prefix_caching=False,
    )
    target_laws, draft_laws = laws(costs)
    virtual = virtual_engine(
        config,
        place,
        (ContextModel(target_laws), costs.target),
        (ContextModel(draft_laws), costs.draft) if num_speculative_tokens else None,
        Delays(network_s=0.0 if place == "beside" else costs.network_ms / 1e3, round_s=costs.overhead_ms / 1e3),
    )
    run_streams(virtual.engine, _prompts(num_streams, num_requests), num_tokens)
    stats = virtual.engine.stats
    lengths = sum(k * count for (k, _), count in stats.num_rounds_by_length.items())
    return Outcome(
        stats.num_generation_tokens / virtual.router.now,
        stats.mean_acceptance_length,
        virtual.hit_rate,
        lengths / stats.num_rounds,
    )


def laws(costs: Costs, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the laws of target and draft, [states, vocab] each: the draft ranks the target's token as `costs` says."""
    chance = random.Random(seed)
    target = torch.full((NUM_STATES, VOCAB_SIZE), 1e-6)
    draft = torch.zeros(NUM_STATES, VOCAB_SIZE)
    falling = torch.tensor([0.7**rank for rank in range(VOCAB_SIZE)])
    for state in range(NUM_STATES):
        order = chance.sample(range(VOCAB_SIZE), VOCAB_SIZE)
        target[state, order[_rank(chance, costs)]] = 1.0
        draft[state, order] = falling
    return target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)


def _rank(chance: random.Random, costs: Costs) -> int:
    """Draw the rank of the target's token among the draft's candidates, 0 the likeliest."""
    if chance.random() < costs.acceptance:
        return 0
    # P(rank > F) = F^-exponent for the F candidates after the first one.
    beyond = (1 - chance.random()) ** (-1 / costs.rank_exponent)
    return min(VOCAB_SIZE - 1, math.floor(beyond) + 1)


def run_streams(engine: Engine, streams: Sequence[Sequence[Sequence[int]]], num_tokens: int) -> None:
    """Run streams side by side, each of a few requests in a row: the prompts to be continued, greedily."""
    left = [list(prompts) for prompts in streams]

    def add(stream: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        engine.add(f"{stream}-{len(left[stream])}", left[stream].pop(), params)

    for stream in range(len(streams)):
        add(stream)
    while engine.has_work:
        for output in run_in_process(engine.step()):
            stream = int(output.request_id.split("-")[0])
            if output.finish_reason is not None and left[stream]:
                add(stream)


def _prompts(num_streams: int, num_requests: int) -> list[list[list[int]]]:
    return [
        [
            random.Random(f"{stream} {request}").choices(range(VOCAB_SIZE), k=PROMPT_TOKENS)
            for request in range(num_requests)
        ]
        for stream in range(num_streams)
    ]
