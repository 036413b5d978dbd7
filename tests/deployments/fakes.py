"""An engine over a model with a known law, a target that is lost on demand, and Routers without Ray."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import torch
from prometheus_client.core import CounterMetricFamily

from cluster.remote_drafter import RemoteDrafter
from cluster.remote_verifier import RemoteVerifier
from deployments.observe.metrics import ReplicaMetrics, RouterMetrics
from deployments.router.delivery import Stream
from deployments.router.round_loop import RoundLoop
from deployments.routing.loads import Heard
from deployments.wire import Description, Generation, ModelLimits, Report
from engine.config import CompileProgress, EngineConfig, ModelInfo
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.predicted import PredictionCopier
from engine.engine import Engine
from engine.errors import TargetError
from engine.params import SamplingParams
from engine.protocols import Drafter, NoDrafter, Verdict, Verifier, VerifyRow
from engine.requests.output import RequestOutput
from engine.sampling.grammar import Grammars
from engine.verification.verifier import ModelVerifier
from tests.fakes import MarkovModel, byte_tokenizer

VOCAB_SIZE = 259  # bytes and three special tokens
MAX_MODEL_LEN = 512
EOS_TOKEN_IDS = [256]


class LosableVerifier:
    """Verifies with a verifier in this process until it is lost; counts rounds, and can hold one up."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.is_lost = False
        self.lose_after: int | None = None
        self.num_rounds = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        await self.gate.wait()
        if self.num_rounds == self.lose_after:
            self.is_lost, self.lose_after = True, None
        if self.is_lost:
            raise TargetError("lost on demand")
        self.num_rounds += 1
        return await self._verifier.verify(rows)

    def release(self, request_id: str) -> None:
        self._verifier.release(request_id)


class Group:
    """Brings its verifier back, a given number of failures later."""

    def __init__(self, verifier: LosableVerifier, num_failures: int = 0) -> None:
        self._verifier = verifier
        self.num_failures = num_failures
        self.num_recoveries = 0
        self.is_recovering = asyncio.Event()

    async def recover(self) -> None:
        self.is_recovering.set()
        await asyncio.sleep(0)
        if self.num_failures > 0:
            self.num_failures -= 1
            raise TargetError("not this time")
        self.num_recoveries += 1
        self._verifier.is_lost = False


class Rig:
    """A round loop over an engine of bytes whose next token is a fixed permutation of the last one."""

    def __init__(
        self, *, grammars: Grammars | None = None, max_queued_requests: int = 64, drafter: Drafter | None = None
    ) -> None:
        transitions = torch.full((VOCAB_SIZE, VOCAB_SIZE), 1e-9)
        transitions[torch.arange(VOCAB_SIZE), (torch.arange(VOCAB_SIZE) * 5 + 7) % 94] = 1.0
        model = MarkovModel(transitions / transitions.sum(-1, keepdim=True), EOS_TOKEN_IDS)
        config = EngineConfig(
            max_num_seqs=8,
            max_queued_requests=max_queued_requests,
            num_blocks=256,
            max_model_len=MAX_MODEL_LEN,
            speculation="fixed",  # the lengths of copies do not depend on the time of rounds
        )
        verifier = ModelVerifier(model, config, grammars)  # type: ignore[arg-type]
        self.grammars = grammars
        self.verifier = LosableVerifier(verifier)
        self.group = Group(self.verifier)
        self.engine = Engine(
            config,
            model.info,
            drafter=CombinedDrafter(drafter or NoDrafter(), PredictionCopier()),
            verifier=self.verifier,
            num_blocks=verifier.num_blocks,
            tokenizer=byte_tokenizer(),
        )
        self.remote_drafter, self.remote_verifier = RemoteDrafter(timeout_s=1.0), RemoteVerifier(timeout_s=1.0)
        self.metrics = RouterMetrics(self.engine, self.remote_drafter, self.remote_verifier)
        self.loop = RoundLoop(self.engine, self.group, self.metrics, round_timeout_s=60.0)


class LocalOutputs:
    """The outputs of one request to a round loop in this process."""

    def __init__(self, loop: RoundLoop, request: Generation) -> None:
        self._sent: asyncio.Queue[list[RequestOutput]] = asyncio.Queue()
        self._task = asyncio.create_task(
            loop.generate(Stream(request, lambda sent: self._sent.put_nowait(sent.outputs)))
        )
        self._task.add_done_callback(lambda _: self._sent.put_nowait([]))

    async def next(self) -> list[RequestOutput]:
        outputs = await self._sent.get()
        if not outputs:
            self._sent.put_nowait([])
            await self._task
        return outputs

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def rounds_of(loop: RoundLoop, request: Generation) -> AsyncGenerator[list[RequestOutput], None]:
    """Generate a request; closing the generator aborts it."""
    outputs = LocalOutputs(loop, request)
    try:
        while sent := await outputs.next():
            yield sent
    finally:
        await outputs.close()


class LocalRouters:
    """The Routers as an Ingress sees them: one round loop in this process, and the last request that came."""

    free = math.inf
    spare = 0.0
    """What another capacity would add to the room."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.error: Exception | None = None
        self.has_loaded = asyncio.Event()
        self.has_loaded.set()
        self.last: Generation | None = None
        self.compiling: CompileProgress | None = None
        self.num_deliveries = 0
        self.num_closed = 0
        self.killed: list[str] = []
        self.refused = Counter[str]()
        self.has_processes = True

    async def kill(self, process: str) -> bool:
        self.killed.append(process)
        return self.has_processes

    def room(self, factor: int = 1) -> float:
        return self.free + (factor - 1) * self.spare

    def retry_after_s(self) -> int:
        return 7

    def count_refusal(self, reason: str) -> None:
        self.refused[reason] += 1

    def generate(self, request: Generation) -> "WatchedOutputs":
        self.last = request
        return WatchedOutputs(self, request)

    async def describe(self) -> Description:
        await self.has_loaded.wait()
        info = ModelInfo("tiny", VOCAB_SIZE, MAX_MODEL_LEN, EOS_TOKEN_IDS, 1000, "float32", "cpu")
        return Description(info, None, ModelLimits(VOCAB_SIZE, MAX_MODEL_LEN, 4), capacity=72)

    def heard(self) -> list[Heard]:
        if not self.has_loaded.is_set():
            return []
        problem = None
        try:
            self.rig.loop.check()
        except TargetError as error:
            problem = str(error)
        return [Heard(Report("router", problem, compiling=self.compiling), 0.0)]

    def collect_here(self) -> ReplicaMetrics:
        return ReplicaMetrics("ingress", [CounterMetricFamily("ingress", "Here.", 1.0)], "10.0.0.8")

    async def collect(self) -> list[ReplicaMetrics]:
        return [self.collect_here(), ReplicaMetrics("router", self.rig.metrics.collect(), "10.0.0.7")]

    async def base_url(self) -> str:
        return "http://paceline"


class WatchedOutputs(LocalOutputs):
    """Outputs that `LocalRouters` counts, and ends with its error after the first ones."""

    def __init__(self, routers: LocalRouters, request: Generation) -> None:
        super().__init__(routers.rig.loop, request)
        self._routers = routers
        self._has_outputs = False

    async def next(self) -> list[RequestOutput]:
        if self._has_outputs and self._routers.error is not None:
            raise self._routers.error
        outputs = await super().next()
        self._has_outputs = True
        self._routers.num_deliveries += bool(outputs)
        return outputs

    async def close(self) -> None:
        self._routers.num_closed += 1
        await super().close()


def generation(*, n: int = 1, num_prompts: int = 1, timeout_s: float = 60.0, **params: object) -> Generation:
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "n": n, **params})  # type: ignore[arg-type]
    return Generation("request", [[1, 2, 3]] * num_prompts, settings, timeout_s)


def output(*token_ids: int, request_id: str = "request", choice: int = 0, **fields: Any) -> RequestOutput:
    """What a round added to a choice of a request; `fields` replace the others."""
    plain = RequestOutput(f"{request_id}-{choice}", [*token_ids], "x", None, None, None, 3, 0, 0, 0)
    return replace(plain, **fields)
