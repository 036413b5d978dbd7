"""Virtual time: the real engine, drafters and verifiers, over backends whose passes only move a clock on.

Each process of a speculation group has a lane, the clock of its virtual time. What is not real is the wire between the
lanes, and how long a pass takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from engine.config import EngineConfig
from engine.drafting.model import ModelDrafter
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.engine import Engine
from engine.execution.attention import KVTensors
from engine.execution.backend import Backend, PassOutput
from engine.execution.batch import ForwardBatch
from engine.protocols import NO_DRAFT, Draft, Drafter, NoDrafter, ProposeRow, Verdict, Verifier, VerifyRow
from engine.sampling.noise import Draws
from engine.stats import RunAheadStats
from engine.verification.verifier import ModelVerifier

Place = Literal["beside", "apart", "ahead"]
"""Where the draft runs: in turn with the target and in its process, in a process of its own, or there and ahead."""

PassTime = Callable[[ForwardBatch], float]
"""The seconds that a pass over a batch takes."""


class Lane:
    """The virtual time of one process, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PricedBackend:
    """A backend whose passes take virtual time on a lane, one after the other, and are waited for as on CUDA."""

    def __init__(self, backend: Backend, lane: Lane, pass_time: PassTime) -> None:
        self.info, self.device = backend.info, backend.device
        self.busy_until = 0.0
        self._backend, self._lane, self._pass_time = backend, lane, pass_time

    @property
    def is_busy(self) -> bool:
        return self._lane.now < self.busy_until

    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        output = self._backend.run(batch, draws)
        self.busy_until = max(self._lane.now, self.busy_until) + self._pass_time(batch)
        return output

    def wait(self) -> None:
        self._lane.now = max(self._lane.now, self.busy_until)

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVTensors:
        return self._backend.allocate_kv(num_blocks, block_size)

    def all_reduce(self, partial: Tensor) -> Tensor:
        return self._backend.all_reduce(partial)

    def warm_up(self, *, compile_missing: bool = True) -> None:
        self._backend.warm_up(compile_missing=compile_missing)


@dataclass(frozen=True, slots=True)
class Delays:
    """What takes time besides passes, in seconds.

    Attributes:
        network_s: one way between the Router and a worker; 0 in one process.
        draft_s: each answer of the draft, besides its passes.
        round_s: each round, besides both models.
    """

    network_s: float = 0.0
    draft_s: float = 0.0
    round_s: float = 0.0


class SimulatedDrafter:
    """A draft worker with a lane of its own: between requests it runs ahead."""

    def __init__(self, drafter: Drafter, model: PricedBackend, router: Lane, lane: Lane, delays: Delays) -> None:
        self._drafter, self._model, self._router, self._lane, self._delays = drafter, model, router, lane, delays

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        arrival = self._router.now + self._delays.network_s
        if isinstance(self._drafter, RunAheadDrafter):
            self._run_ahead(self._drafter, arrival)
        elif not any(row.num_draft_tokens for row in rows):
            return [NO_DRAFT] * len(rows)  # then a `RemoteDrafter` calls nobody
        self._lane.now = max(self._lane.now, arrival)
        # As over a wire: what the Router commits meanwhile, the worker does not see.
        drafts = await self._drafter.propose([replace(row, request=row.request.copy()) for row in rows])
        self._lane.now += self._delays.draft_s
        self._router.now = max(self._router.now, self._lane.now + self._delays.network_s)
        return drafts

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)

    def _run_ahead(self, drafter: RunAheadDrafter, arrival: float) -> None:
        """Launch passes ahead until the next request arrives; the pass that is under way then goes on."""
        while self._lane.now < arrival and drafter.has_time:
            if self._model.is_busy:
                self._lane.now = min(arrival, self._model.busy_until)
            elif not drafter.advance():
                return


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


@dataclass(frozen=True, slots=True)
class VirtualEngine:
    """An engine in virtual time.

    Attributes:
        router: the lane that the engine and the target run on.
        run_ahead: what the draft's running ahead was worth; None where it does not run ahead.
    """

    engine: Engine
    router: Lane
    run_ahead: RunAheadStats | None

    @property
    def hit_rate(self) -> float | None:
        if self.run_ahead is None:
            return None
        return self.run_ahead.hits / max(1, self.run_ahead.hits + sum(self.run_ahead.misses.values()))


def virtual_engine(
    config: EngineConfig,
    place: Place,
    target: tuple[Backend, PassTime],
    draft: tuple[Backend, PassTime] | None,
    delays: Delays,
) -> VirtualEngine:
    """Return an engine over two models and the times of their passes; without a draft it decodes plainly."""
    router = Lane()
    target_model = PricedBackend(target[0], router, target[1])
    verifier = ModelVerifier(target_model, config)
    drafter: Drafter = NoDrafter()
    run_ahead: RunAheadStats | None = None
    if draft is not None:
        lane = router if place == "beside" else Lane()
        draft_model = PricedBackend(draft[0], lane, draft[1])
        if place == "ahead":
            ahead = RunAheadDrafter(draft_model, config, clock=lane)
            run_ahead = ahead.stats
            drafter = SimulatedDrafter(ahead, draft_model, router, lane, delays)
        else:
            drafter = SimulatedDrafter(ModelDrafter(draft_model, config), draft_model, router, lane, delays)
    engine = Engine(
        config,
        drafter=drafter,
        verifier=SimulatedVerifier(verifier, router, 2 * delays.network_s + delays.round_s),
        num_blocks=verifier.num_blocks,
        vocab_size=target_model.info.vocab_size,
        max_model_len=target_model.info.max_model_len,
        clock=router,
    )
    return VirtualEngine(engine, router, run_ahead)
