"""SpeculationGroup: place, start, watch, restart and stop the workers of one Router replica."""

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup

from cluster.capacity import wait_for_placement
from cluster.config import GroupConfig, suited_to_models
from cluster.leases import Lease, Leases, OwnDraft, keep_lease, wait_for_draft
from cluster.memory_plan import MemoryPlan
from cluster.placement import count_cores, make_placement, share_cores
from cluster.remote_drafter import RemoteDrafter
from cluster.remote_verifier import RemoteVerifier
from cluster.transport import Connector
from cluster.worker_set import WorkerDiedError, WorkerSet, introduce, start_draft, start_target
from engine.config import CompileProgress
from engine.errors import TargetError
from engine.models.registry import open_model
from engine.models.shared_tokens import shared_tokens
from engine.models.source import ModelSource

if TYPE_CHECKING:
    from engine.config import ModelInfo
    from engine.protocols import Drafter

logger = logging.getLogger(__name__)

T = TypeVar("T")

DRAFT_TIMEOUT_S = 1.0
"""How long a round waits for its drafts: many rounds long, so only a lost or starved draft is late."""
_FIRST_RETRY_S = 0.5
_MAX_STARTS = 5
"""How often the target is started before the start of the group fails."""
_LAST_WORDS_S = 0.5
"""How long a restart waits for Ray's reason why a rank ended, which comes after the connection breaks."""


class SpeculationGroup:
    """The workers of one Router replica, and the engine's two roles over them.

    A group belongs to the event loop that started it, and has started once the target can take rounds. The draft worker
    joins when it has loaded; decoding goes on without it whenever it ends.
    """

    def __init__(
        self,
        config: GroupConfig,
        placement: PlacementGroup,
        connector: Connector,
        target: ModelSource,
        draft: ModelSource | None,
        *,
        owns_placement: bool,
        leases: Leases | None = None,
    ) -> None:
        self.config = config
        self.target_source = target
        self._draft_source = draft
        self.target_info: ModelInfo
        self.draft_info: ModelInfo | None = None
        self.num_blocks: int
        self.num_states: int
        self._placement = placement
        self._owns_placement = owns_placement
        self._connector = connector
        self._versions = itertools.count(1)
        self._memory_plan = MemoryPlan(config.engine, config.draft_learning)
        self._target: WorkerSet | None = None
        self._own_draft = OwnDraft(self._start_draft, config.hang_timeout_s) if config.places_draft_worker else None
        self._leases = leases or self._own_draft
        self._lease: Lease | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None]
        self._is_stopped = False
        self._recovering = asyncio.Lock()
        self.remote_verifier = RemoteVerifier(timeout_s=config.round_timeout_s)
        self.remote_drafter = RemoteDrafter(timeout_s=DRAFT_TIMEOUT_S)
        drafter = self.remote_drafter if config.has_draft_worker else config.method.make(config.engine, None)
        self.drafter: Drafter = config.method.drafter_of_engine(config.engine, drafter)

    @classmethod
    async def start(cls, config: GroupConfig, leases: Leases | None = None) -> "SpeculationGroup":
        """Place and start all workers; without `leases`, a draft worker of the group's own, too.

        Raises ModelError if the models cannot be served together, TargetError if the workers did not start in time.
        """
        target, draft = open_model(config.target), None if config.draft is None else open_model(config.draft)
        config = await asyncio.to_thread(suited_to_models, config, target, draft)
        current = ray.util.get_current_placement_group()
        placement = current or make_placement(config)
        node_id = ray.get_runtime_context().get_node_id()
        config = share_cores(config, placement.bundle_specs, num_cores=count_cores(node_id))
        group = cls(config, placement, Connector(node_id), target, draft, owns_placement=current is None, leases=leases)
        limit_s = config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await wait_for_placement(config, placement)
                await group._start_all()
        except BaseException as error:
            await group.stop()
            if isinstance(error, TimeoutError):
                message = f"the workers did not start within {limit_s:g} s; their bundles are {placement.bundle_specs}"
                raise TargetError(message) from error
            raise
        return group

    @property
    def is_available(self) -> bool:
        return self.remote_verifier.is_available

    @property
    def compiling(self) -> CompileProgress | None:
        """Progress of all compilations, which run side by side; None if no model is being compiled."""
        compilations = [progress for workers in self._workers for progress in workers.compiling]
        if not compilations:
            return None
        done, of, left_s = zip(*compilations, strict=True)
        return CompileProgress(sum(done), sum(of), max(left_s))

    async def recover(self) -> None:
        """Restart all target ranks if any is lost; their KV cache is empty afterwards.

        Raises TargetError if they did not start, and a retry may succeed; ModelError if they no longer fit.
        """
        async with self._recovering:
            if self.remote_verifier.is_available:
                return
            limit_s = self.config.start_timeout_s
            try:
                async with asyncio.timeout(limit_s):
                    await self._run_in_background(self._start_target())
            except TimeoutError as error:
                raise TargetError(f"the target did not restart within {limit_s:g} s") from error
            except asyncio.CancelledError as error:
                if self._is_stopped:
                    raise TargetError("the group was stopped") from error
                raise
            logger.info("Target restarted")

    async def kill(self, process: str) -> bool:
        """Kill the draft worker ("draft") or the target's first rank, as a fault would; return False if it is gone."""
        if process == "draft":
            return self._lease is not None and self._leases is not None and await self._leases.kill(self._lease)
        if self._target is not None:
            self._target.actors[0].kill.remote()
        return self._target is not None

    async def stop(self) -> None:
        """Kill all workers and give the resources back; a second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.remote_verifier.disconnect("the group was stopped")
        for workers in self._workers:
            workers.kill()
        self._target = None
        if self._own_draft is not None:
            self._own_draft.workers = None
        if self._owns_placement:
            ray.util.remove_placement_group(self._placement)

    async def _start_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                target = tasks.create_task(self._start_first_target())
                if self._draft_source is not None:
                    for draft in self._draft_source.drafts:
                        tasks.create_task(asyncio.to_thread(shared_tokens, self.target_source, draft))
                    self._run_in_background(self._keep_lease())
                    if self._own_draft is not None:
                        start = self._run_in_background(self._start_draft())
                        self._run_in_background(self._own_draft.keep(start))
                        tasks.create_task(wait_for_draft(start, target))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start_first_target(self) -> None:
        pause_s = _FIRST_RETRY_S
        for num_starts in range(1, _MAX_STARTS):
            try:
                return await self._start_target()
            except WorkerDiedError as error:
                counts = f"{num_starts} of {_MAX_STARTS}"
                logger.warning("The target did not survive start %s, next in %g s: %s", counts, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return await self._start_target()

    async def _start_target(self) -> None:
        if self._target is not None:
            await asyncio.wait([self._watching], timeout=_LAST_WORDS_S)
            self._target.kill()
            self._target = None
        ranks = await start_target(
            self.config,
            self._placement,
            self._connector,
            next(self._versions),
            self._memory_plan,
            self.remote_verifier.disconnect,
        )
        self._target = ranks
        self.target_info = ranks.loaded[0]
        self.num_blocks = ranks.cache.num_blocks + 1  # block 0, where padding is written, is not planned
        self.num_states = ranks.cache.num_states
        self.remote_verifier.vocab_size = self.remote_drafter.vocab_size = self.target_info.vocab_size
        self.remote_verifier.connect(ranks.links)
        self._watching = self._run_in_background(self._watch_target(ranks))
        self._introduce()

    async def _start_draft(self) -> WorkerSet:
        return await start_draft(self.config, self._placement, self._memory_plan)

    async def _keep_lease(self) -> None:
        def taken(lease: Lease) -> None:
            self._lease, self.draft_info = lease, lease.info
            self._introduce()

        assert self._leases is not None, "a group without a draft worker of its own is started with leases"
        num_rows = self.config.engine.max_num_seqs
        await keep_lease(self._leases, self._connector, self.remote_drafter, num_rows, taken)

    def _introduce(self) -> None:
        draft = None if self._own_draft is None else self._own_draft.workers
        if self.config.method.reads_features and self._target and draft and self._lease:
            self._run_in_background(introduce(self._target, draft, self._lease))

    @property
    def _workers(self) -> list[WorkerSet]:
        draft = None if self._own_draft is None else self._own_draft.workers
        return [workers for workers in (draft, self._target) if workers is not None]

    async def _watch_target(self, ranks: WorkerSet) -> None:
        reason = await ranks.wait_for_end(self.config.hang_timeout_s)
        if ranks is self._target:
            logger.warning("A target rank was lost: %s", reason)
            self.remote_verifier.disconnect(f"a target rank was lost: {reason}")

    def _run_in_background(self, coroutine: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
