"""WorkerSet: the draft worker, or all ranks of the target, from start to end; a restart makes a new set."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup

from cluster.config import GroupConfig
from cluster.memory_plan import Located, MemoryPlan
from cluster.placement import draft_options, rank_beside_draft, rank_options
from cluster.transport import Connector, Link, OnBreak
from cluster.workers.actors import DraftWorker, TargetWorker, WorkerProcess
from engine.config import ModelConfig, ModelInfo
from engine.errors import ModelError, TargetError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_ANSWER_S = 30.0
"""How long a worker's process may take to start and answer; only after that can a hang be told from slow imports."""
_PING_PERIOD_S = 1.0
_DEATH_NOTICE_S = 0.5
"""How long Ray may take to report that a worker was killed, after another rank has failed because of that."""


class WorkerDiedError(TargetError):
    """A worker's process ended or hung while it started, not by its own code; another start may succeed."""


@dataclass(slots=True)
class WorkerSet:
    """Workers that are started together and killed together.

    Attributes:
        name: the name of one worker in the log.
        num_blocks: the KV blocks that each of them has, without block 0.
        loaded: the model that each of them has loaded.
    """

    name: str
    actors: list[Any]
    processes: list[WorkerProcess] = field(default_factory=list)
    num_blocks: int = 0
    loaded: list[ModelInfo] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    serving: list[Any] = field(default_factory=list)

    async def connect(self, connector: Connector, version: int, on_break: OnBreak | None = None) -> None:
        """Have every worker listen, and begin to connect to each.

        Raises:
            WorkerDiedError: one was killed, or does not answer.
        """
        try:
            async with asyncio.timeout(_FIRST_ANSWER_S):
                self.processes = await _results([actor.listen.remote(connector.identity) for actor in self.actors])
        except TimeoutError as error:
            raise WorkerDiedError(f"a worker did not answer within {_FIRST_ANSWER_S:g} s of its start") from error
        self.links = [
            connector.connect(process.endpoint, version=version, on_break=on_break) for process in self.processes
        ]

    async def survey(self, model: ModelConfig, *ranks: int, world_size: int = 1) -> list[Located]:
        """Have these workers survey their devices for a model, of which each loads a shard."""
        surveys = await _results([self.actors[rank].survey.remote(model, world_size) for rank in ranks])
        return list(zip([self.processes[rank].endpoint.node_id for rank in ranks], surveys, strict=True))

    async def while_answering(self, hang_timeout_s: float, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine for as long as the workers answer pings; one that loads answers them late, but it does.

        Raises:
            WorkerDiedError: one has not answered for `hang_timeout_s`.
        """
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

    def start_serving(self) -> None:
        """Have the workers answer requests until they end."""
        self.serving = [actor.serve.remote() for actor in self.actors]
        for rank, process in enumerate(self.processes):
            logger.info("%s %d: process %d on node %s", self.name, rank, process.pid, process.endpoint.node_id)

    async def wait_for_end(self, hang_timeout_s: float) -> str:
        """Wait until one of the workers has ended or answers no more, and return the reason.

        Args:
            hang_timeout_s: how long an answer to a ping is waited for.
        """
        outcomes = [asyncio.create_task(_outcome(reference)) for reference in self.serving]
        outcomes.append(asyncio.create_task(self._wait_for_silence(hang_timeout_s)))
        try:
            done, _ = await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in outcomes:
                task.cancel()

    async def _wait_for_silence(self, hang_timeout_s: float) -> str:
        """Ping the workers until one does not answer; a process that hangs in a pass of its model answers."""
        while True:
            await asyncio.sleep(_PING_PERIOD_S)
            pings = [actor.ping.remote() for actor in self.actors]
            try:
                async with asyncio.timeout(hang_timeout_s):
                    await asyncio.gather(*pings)
            except TimeoutError:
                return f"it did not answer for {hang_timeout_s:g} s"
            except ray.exceptions.RayError:
                continue  # if it has ended, its outcome says why

    def kill(self) -> None:
        """Close the links and kill the processes."""
        for link in self.links:
            link.close()
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


async def start_draft(
    config: GroupConfig, placement: PlacementGroup, connector: Connector, version: int, plan: MemoryPlan
) -> WorkerSet:
    """Start the draft worker and wait until it has loaded.

    Raises:
        ModelError: the model cannot be served.
        WorkerDiedError: the worker was killed, or hangs.
        TargetError: the worker failed.
    """
    assert config.draft is not None, "every method of a draft worker loads a model"
    actor_class = ray.remote(DraftWorker).options(**draft_options(config, placement))
    workers = WorkerSet("draft worker", [actor_class.remote(config.engine, version, config.log_format)])
    try:
        await workers.connect(connector, version)
        await workers.while_answering(config.hang_timeout_s, _load_draft(workers, config, config.draft, plan))
        workers.start_serving()
    except BaseException:
        workers.kill()
        raise
    return workers


async def start_target(
    config: GroupConfig,
    placement: PlacementGroup,
    connector: Connector,
    version: int,
    plan: MemoryPlan,
    on_break: OnBreak,
) -> WorkerSet:
    """Start all ranks of the target, in a torch.distributed world of their own, and wait until all have loaded.

    Args:
        on_break: called when the connection to any rank breaks.

    Raises:
        ModelError: the model cannot be served.
        WorkerDiedError: a rank was killed, or hangs.
        TargetError: a rank failed.
    """
    size = config.tensor_parallel_size
    actor_class = ray.remote(TargetWorker)
    workers = WorkerSet(
        "target rank",
        [
            actor_class.options(**rank_options(config, placement, rank)).remote(
                config.engine, version, config.log_format, rank, size
            )
            for rank in range(size)
        ],
    )
    try:
        await workers.connect(connector, version, on_break)
        await workers.while_answering(config.hang_timeout_s, _load_target(workers, config, placement, plan))
        workers.start_serving()
    except BaseException:
        workers.kill()
        raise
    return workers


async def _load_draft(workers: WorkerSet, config: GroupConfig, draft: ModelConfig, plan: MemoryPlan) -> None:
    surveys = [] if plan.knows("draft") else await workers.survey(draft, 0)
    workers.num_blocks = await plan.plan_draft(surveys)
    [actor] = workers.actors
    workers.loaded = await _results(
        [actor.load.remote(draft, config.target, workers.num_blocks, run_ahead=config.run_ahead == "on")]
    )


async def _load_target(workers: WorkerSet, config: GroupConfig, placement: PlacementGroup, plan: MemoryPlan) -> None:
    size, timeout_s = config.tensor_parallel_size, config.start_timeout_s
    address = None
    if size > 1:
        _warn_of_several_nodes(workers.processes)
        [address] = await _results([workers.actors[0].open_store.remote(timeout_s)])
    target: list[Located] = []
    draft: list[Located] = []
    if not plan.knows("target"):
        target = await workers.survey(config.target, *range(size), world_size=size)
        rank = await asyncio.to_thread(rank_beside_draft, config, placement)
        if rank is not None and config.draft is not None:
            draft = await workers.survey(config.draft, rank)
    workers.num_blocks = plan.plan_target(target, draft)
    workers.loaded = await _results(
        [actor.load.remote(config.target, workers.num_blocks, address, timeout_s) for actor in workers.actors]
    )


def _warn_of_several_nodes(ranks: list[WorkerProcess]) -> None:
    num_nodes = len({rank.endpoint.node_id for rank in ranks})
    if num_nodes > 1:
        logger.warning(
            "The target's %d ranks are on %d nodes; every layer waits for the network between them",
            len(ranks),
            num_nodes,
        )


def first_line(error: Exception) -> str:
    """Return what an exception says in one line; Ray's go on with details of the actor, or with a traceback."""
    return str(error).partition("\n")[0]


async def _results(references: list[Awaitable[T]]) -> list[T]:
    """Wait for Ray's results, and translate Ray's exceptions into ours."""
    answers = [asyncio.ensure_future(reference) for reference in references]
    try:
        return list(await asyncio.gather(*answers))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ModelError):
            raise error.cause from None
        if death := await _death_among(answers):
            raise _start_error(death) from error
        raise TargetError(f"a worker failed to start: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise _start_error(error) from error


async def _death_among(answers: Sequence[asyncio.Future[T]]) -> ray.exceptions.RayActorError | None:
    """Return why one of the ranks has died; the others fail as soon as they lose it, before Ray reports its death."""
    await asyncio.wait(answers, timeout=_DEATH_NOTICE_S)
    errors = [answer.exception() for answer in answers if answer.done()]
    return next((error for error in errors if isinstance(error, ray.exceptions.RayActorError)), None)


def _start_error(error: ray.exceptions.RayError) -> TargetError:
    """Translate the end of a worker; what its constructor raises would be raised again."""
    was_killed = isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed
    error_class = WorkerDiedError if was_killed else TargetError
    return error_class(f"a worker died while starting: {_reason(error)}")


async def _outcome(reference: Awaitable[None]) -> str:
    try:
        await reference
    except ray.exceptions.RayTaskError as error:
        return repr(error.cause)
    except ray.exceptions.RayError as error:
        return _reason(error)
    return "it stopped"


def _reason(error: ray.exceptions.RayError) -> str:
    """Return why Ray says that a process ended: the text after the actor's details, without Ray's guesses."""
    if not isinstance(error, ray.exceptions.ActorDiedError):
        return first_line(error)
    if error.actor_init_failed:
        return str(error).splitlines()[-1]  # the exception, which follows its traceback
    text = " ".join(line for line in str(error).splitlines()[1:] if not line.startswith("\t"))
    return text.partition(" Some common causes")[0] or first_line(error)
