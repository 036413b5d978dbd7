"""WorkerSet: the draft worker, or all ranks of the target, from start to end; a restart makes a new set."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup

from cluster.config import GroupConfig
from cluster.memory_plan import Located, MemoryPlan
from cluster.placement import draft_options, rank_beside_draft, rank_options
from cluster.transport import Connector, Link, OnBreak
from cluster.workers.actors import TargetWorker, WorkerProcess
from cluster.workers.draft_worker import DraftWorker, Lease
from engine.config import CompileProgress, ModelConfig, ModelInfo
from engine.errors import ModelError, TargetError
from engine.execution.memory import CacheSize

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_ANSWER_S = 30.0
"""How long a worker's process may take to start and answer: until then, a hang looks like slow imports."""
_PING_PERIOD_S = 1.0
_DEATH_NOTICE_S = 0.5
"""How long Ray may take to report that a worker was killed, after another rank has failed because of that."""


class WorkerDiedError(TargetError):
    """A worker was killed or hung while it started, so another start may succeed."""


@dataclass(slots=True)
class WorkerSet:
    """Workers that start and end together, with caches of one size."""

    name: str
    actors: list[Any]
    processes: list[WorkerProcess] = field(default_factory=list)
    cache: CacheSize = field(default_factory=lambda: CacheSize(0, 0))
    loaded: list[ModelInfo] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    serving: list[Any] = field(default_factory=list)
    compiling: list[CompileProgress] = field(default_factory=list)

    async def start(self, config: GroupConfig, load: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the workers' processes, load, and have them serve; kill them if any of that fails.

        Raises ModelError for an unfit model, WorkerDiedError if a worker was killed or hung, else TargetError.
        """
        try:
            await self._begin(config)
            await self.while_answering(config.hang_timeout_s, load())
            self.serving = [actor.serve.remote() for actor in self.actors]
        except BaseException:
            self.kill()
            raise
        for rank, process in enumerate(self.processes):
            logger.info("%s %d: process %d on node %s", self.name, rank, process.pid, process.node_id)

    async def _begin(self, config: GroupConfig) -> None:
        try:
            async with asyncio.timeout(_FIRST_ANSWER_S):
                self.processes = await results([actor.begin.remote(config.log_format) for actor in self.actors])
        except TimeoutError as error:
            raise WorkerDiedError(f"a worker did not answer within {_FIRST_ANSWER_S:g} s of its start") from error

    async def connect(self, connector: Connector, version: int, on_break: OnBreak) -> None:
        endpoints = await results([actor.listen.remote(connector.identity) for actor in self.actors])
        self.links = [connector.connect(endpoint, version=version, on_break=on_break) for endpoint in endpoints]

    async def survey(self, model: ModelConfig, *ranks: int, world_size: int = 1) -> list[Located]:
        """Have these workers survey their devices for a model, one shard each."""
        surveys = await results([self.actors[rank].survey.remote(model, world_size) for rank in ranks])
        return list(zip([self.processes[rank].node_id for rank in ranks], surveys, strict=True))

    async def load(self, *arguments: Any) -> None:
        self.loaded = await results([actor.load.remote(*arguments) for actor in self.actors])

    async def while_answering(self, hang_timeout_s: float, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine while the workers answer pings; raise WorkerDiedError after a silence of `hang_timeout_s`."""
        working = asyncio.create_task(work)
        silence = asyncio.create_task(self._wait_for_silence(hang_timeout_s))
        try:
            await asyncio.wait([working, silence], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise WorkerDiedError(f"a worker hung while starting: {silence.result()}")
            working.result()
        finally:
            working.cancel()
            silence.cancel()
            await asyncio.gather(working, silence, return_exceptions=True)

    async def wait_for_end(self, hang_timeout_s: float) -> str:
        """Wait until a worker has ended or has not answered for `hang_timeout_s`, and return the reason."""
        outcomes = [asyncio.create_task(_outcome(reference)) for reference in self.serving]
        outcomes.append(asyncio.create_task(self._wait_for_silence(hang_timeout_s)))
        try:
            done, _ = await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in outcomes:
                task.cancel()

    async def _wait_for_silence(self, hang_timeout_s: float) -> str:
        """Ping until a worker does not answer; a worker whose pass hangs still answers."""
        while True:
            await asyncio.sleep(_PING_PERIOD_S)
            pings = [actor.ping.remote() for actor in self.actors]
            try:
                async with asyncio.timeout(hang_timeout_s):
                    self.compiling = [*chain(*await asyncio.gather(*pings))]
            except TimeoutError:
                return f"it did not answer for {hang_timeout_s:g} s"
            except ray.exceptions.RayError:
                continue  # if it has ended, its outcome says why

    def kill(self) -> None:
        for link in self.links:
            link.close()
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


async def start_draft(config: GroupConfig, placement: PlacementGroup, plan: MemoryPlan) -> WorkerSet:
    """Start the group's own draft worker and wait until it has loaded; raise what `WorkerSet.start` raises."""
    assert config.draft is not None, "every method of a draft worker loads a model"
    draft, limit_s = config.draft, config.start_timeout_s
    actor = ray.remote(DraftWorker).options(**draft_options(config, placement))
    workers = WorkerSet("draft worker", [actor.remote(config, "of this group")])

    async def load() -> None:
        workers.cache = await plan.plan_draft([] if plan.knows("draft") else await workers.survey(draft, 0))
        await workers.load(workers.cache)

    try:
        async with asyncio.timeout(limit_s):
            await workers.start(config, load)
    except TimeoutError as error:
        raise WorkerDiedError(f"it did not start within {limit_s:g} s") from error
    return workers


async def start_target(
    config: GroupConfig,
    placement: PlacementGroup,
    connector: Connector,
    version: int,
    plan: MemoryPlan,
    on_break: OnBreak,
) -> WorkerSet:
    """Start all target ranks in a new torch.distributed world, and wait until they have loaded.

    `on_break` is called when the connection to a rank breaks. Raises what `WorkerSet.start` raises.
    """
    size, timeout_s = config.tensor_parallel_size, config.start_timeout_s
    actor = ray.remote(TargetWorker)
    ranks = [
        actor.options(**rank_options(config, placement, rank)).remote(config.engine, version, rank, size)
        for rank in range(size)
    ]
    workers = WorkerSet("target rank", ranks)

    async def load() -> None:
        await workers.connect(connector, version, on_break)
        [address] = await results([workers.actors[0].open_store.remote(timeout_s)]) if size > 1 else [None]
        target: list[Located] = []
        draft: list[Located] = []
        if not plan.knows("target"):
            target = await workers.survey(config.target, *range(size), world_size=size)
            rank = await asyncio.to_thread(rank_beside_draft, config, placement)
            if rank is not None and config.draft is not None:
                draft = await workers.survey(config.draft, rank)
        workers.cache = plan.plan_target(target, draft)
        await workers.load(config.target, workers.cache, address, timeout_s)

    await workers.start(config, load)
    return workers


async def introduce(target: WorkerSet, draft: WorkerSet, lease: Lease) -> None:
    """Have the target send its features under a lease; if either dies meanwhile, its next start calls this again."""
    rank, worker = target.actors[0], draft.actors[0]
    try:
        [identity] = await results([rank.feature_identity.remote()])
        [endpoint] = await results([worker.receive_features.remote(lease, identity)])
        await results([rank.send_features.remote(endpoint)])
    except TargetError as error:
        logger.warning("The draft worker gets no features of the target, and drafts nothing: %s", error)


async def results(references: list[Awaitable[T]]) -> list[T]:
    """Wait for Ray's results, and translate Ray's exceptions into ours."""
    answers = [asyncio.ensure_future(reference) for reference in references]
    try:
        return list(await asyncio.gather(*answers))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ModelError):
            raise error.cause from None
        death: ray.exceptions.RayError | None = await _death_among(answers)
        if death is None:
            raise TargetError(f"a worker failed to start: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        death = error
    # Another start helps only if the worker was killed.
    was_killed = isinstance(death, ray.exceptions.RayActorError) and not death.actor_init_failed
    raise (WorkerDiedError if was_killed else TargetError)(f"a worker died while starting: {_reason(death)}") from death


async def _death_among(answers: Sequence[asyncio.Future[T]]) -> ray.exceptions.RayActorError | None:
    """Return a rank's death once Ray reports it: the other ranks fail earlier, as soon as they lose that rank."""
    await asyncio.wait(answers, timeout=_DEATH_NOTICE_S)
    errors = [answer.exception() for answer in answers if answer.done()]
    return next((error for error in errors if isinstance(error, ray.exceptions.RayActorError)), None)


async def _outcome(reference: Awaitable[None]) -> str:
    try:
        await reference
    except ray.exceptions.RayTaskError as error:
        return repr(error.cause)
    except ray.exceptions.RayError as error:
        return _reason(error)
    return "it stopped"


def _reason(error: ray.exceptions.RayError) -> str:
    """Return why a process ended, in Ray's words: without the actor's details and Ray's guesses."""
    first, *lines = str(error).splitlines() or [""]
    if not isinstance(error, ray.exceptions.ActorDiedError):
        return first
    if error.actor_init_failed:
        return lines[-1] if lines else first  # the exception, which follows its traceback
    text = " ".join(line for line in lines if not line.startswith("\t"))
    return text.partition(" Some common causes")[0] or first
