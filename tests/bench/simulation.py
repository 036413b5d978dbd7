"""Simulation: the real engine, control and run-ahead code over models that cost virtual time, for hardware we lack.

What is not real: the two models and the wires. The models read their context out of the KV cache through the batch's
own masks, as any model does, and agree with a chosen probability; a forward pass only moves a clock on.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from engine.config import EngineConfig, Speculation
from engine.drafting.model import ModelDrafter
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.engine import Engine
from engine.execution.batch import ForwardBatch
from engine.llm import run_in_process
from engine.protocols import Draft, Drafter, NoDrafter, ProposeRow, Verdict, Verifier, VerifyRow
from engine.sampling.params import SamplingParams
from engine.verification.verifier import ModelVerifier
from tests.fakes import ContextModel

if TYPE_CHECKING:
    from engine.stats import RunAheadStats

NUM_STATES = 4001
VOCAB_SIZE = 48
PROMPT_TOKENS = 8

Place = Literal["beside", "apart", "ahead"]
"""Where the draft runs: on the target's devices in turn with it, on its own, or on its own and running ahead."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a machine and a pair of models take; times in milliseconds.

    Attributes:
        target_ms, target_row_ms, target_token_ms: a target pass, each request in it, and each token.
        draft_ms, draft_token_ms: a draft pass, and each token in it.
        network_ms: one way between the Router and a worker; 0 in one process.
        overhead_ms: what a round spends outside both models.
        acceptance: P(a draft token is accepted | those before it were), by position; the last one goes on.
        rank_exponent: a token that was not drafted is beyond the F next candidates with probability F^-exponent.
    """

    target_ms: float
    target_row_ms: float
    target_token_ms: float
    draft_ms: float
    draft_token_ms: float
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


class Lane:
    """The virtual time of one process, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PricedModel(ContextModel):
    """A model whose passes take virtual time on a lane."""

    def __init__(self, laws: torch.Tensor, lane: Lane, pass_ms: float, row_ms: float, token_ms: float) -> None:
        super().__init__(laws)
        self._lane, self._pass_ms, self._row_ms, self._token_ms = lane, pass_ms, row_ms, token_ms

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        num_rows = sum(group.rows for group in batch.paged.groups)
        self._lane.now += (self._pass_ms + self._row_ms * num_rows + self._token_ms * len(batch.token_ids)) / 1e3
        return super().logits(batch)


class SimulatedDrafter:
    """A draft worker with a lane of its own: between requests it runs ahead, and ends the pass that it is in."""

    def __init__(self, drafter: Drafter, router: Lane, lane: Lane, network_s: float) -> None:
        self._drafter, self._router, self._lane, self._network_s = drafter, router, lane, network_s

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        arrival = self._router.now + self._network_s
        if isinstance(self._drafter, RunAheadDrafter):
            while self._lane.now < arrival and self._drafter.has_time and self._drafter.advance():
                pass
        self._lane.now = max(self._lane.now, arrival)
        # As over a wire: what the Router commits meanwhile, the worker does not see.
        drafts = await self._drafter.propose([replace(row, request=row.request.copy()) for row in rows])
        self._router.now = max(self._router.now, self._lane.now + self._network_s)
        return drafts

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)


class SimulatedVerifier:
    """A target whose requests and replies take their way."""

    def __init__(self, verifier: Verifier, router: Lane, extra_s: float) -> None:
        self._verifier, self._router, self._extra_s = verifier, router, extra_s

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        verdicts = await self._verifier.verify(rows)
        self._router.now += self._extra_s
        return verdicts

    def release(self, request_id: str) -> None:
        self._verifier.release(request_id)


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
    router = Lane()
    lane = router if place == "beside" else Lane()
    target_laws, draft_laws = laws(costs)
    target = PricedModel(target_laws, router, costs.target_ms, costs.target_row_ms, costs.target_token_ms)
    model = PricedModel(draft_laws, lane, costs.draft_ms, 0.0, costs.draft_token_ms)
    network_s = costs.network_ms / 1e3
    verifier = ModelVerifier(target, config)
    drafter: Drafter = NoDrafter()
    stats: RunAheadStats | None = None
    if place == "ahead":
        ahead = RunAheadDrafter(model, config, clock=lane)
        stats = ahead.stats
        drafter = SimulatedDrafter(ahead, router, lane, network_s)
    elif num_speculative_tokens:
        drafter = SimulatedDrafter(ModelDrafter(model, config), router, lane, 0 if place == "beside" else network_s)
    engine = Engine(
        config,
        drafter=drafter,
        verifier=SimulatedVerifier(verifier, router, 2 * network_s + costs.overhead_ms / 1e3),
        num_blocks=verifier.num_blocks,
        vocab_size=VOCAB_SIZE,
        max_model_len=4096,
        clock=router,
    )
    run_streams(engine, _prompts(num_streams, num_requests), num_tokens)
    drafts = engine.stats
    hits = None if stats is None else stats.hits / max(1, stats.hits + sum(stats.misses.values()))
    lengths = sum(k * count for (k, _), count in drafts.num_rounds_by_length.items())
    return Outcome(
        drafts.num_generation_tokens / router.now,
        drafts.mean_acceptance_length,
        hits,
        lengths / drafts.num_rounds,
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
