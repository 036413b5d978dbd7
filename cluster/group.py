"""SpeculationGroup: place, start, watch, restart and stop the workers of one Router replica."""

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import PlacementGroup

from cluster.config import GroupConfig as GroupConfig
from cluster.placement import STRATEGY, count_cores, placement_bundles, settle
from cluster.remote import RemoteDrafter, RemoteVerifier
from cluster.transport.credentials import make_credentials
from cluster.worker_set import Crew, start_draft, start_target
from engine.errors import ModelError, TargetError
from engine.models.tokenizer import check_same_vocabulary
from engine.protocols import Drafter, NoDrafter, Verifier

if TYPE_CHECKING:
    from engine.config import ModelInfo

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0
_PING_TIMEOUT_S = 10.0


class SpeculationGroup:
    """The draft worker and the target ranks of one Router replica, and the engine's two roles over them.

    Belongs to the event loop that started it. A draft worker that dies is started again in the background while
    decoding goes on; target ranks are started again, all of them, when `recover` is called.
    """

    def __init__(self, config: GroupConfig, placement: PlacementGroup, *, owns_placement: bool) -> None:
        self.config = config
        self.target_info: ModelInfo
        self.draft_info: ModelInfo | None = None
        self.num_blocks: int
        self._placement = placement
        self._owns_placement = owns_placement
        self._credentials = make_credentials()
        self._versions = itertools.count(1)
        self._target: Crew | None = None
        self._draft: Crew | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._recovering = asyncio.Lock()
        self._remote_verifier = RemoteVerifier(timeout_s=config.verify_timeout_s)
        self._remote_drafter = RemoteDrafter(timeout_s=config.draft_timeout_s, prepares=config.run_ahead == "on")
        self.verifier: Verifier = self._remote_verifier
        self.drafter: Drafter = NoDrafter() if config.draft is None else self._remote_drafter

    @classmethod
    async def start(cls, config: GroupConfig) -> "SpeculationGroup":
        """Place and start all workers, in the current placement group or in one of its own.

        Raises:
            ModelError: a model cannot be served, or the two cannot work together.
            TargetError: the workers could not be placed, or did not start in time.
        """
        current = ray.util.get_current_placement_group()
        placement = current or _make_placement(config)
        num_cores = count_cores(ray.get_runtime_context().get_node_id())
        config = settle(config, placement.bundle_specs, num_cores=num_cores)
        group = cls(config, placement, owns_placement=current is None)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await asyncio.to_thread(placement.wait, int(config.start_timeout_s))
                await group._start_all()
        except TimeoutError as error:
            await group.stop()
            raise TargetError(
                f"the workers did not start within {config.start_timeout_s:g} s; "
                f"their bundles are {placement.bundle_specs}"
            ) from error
        except BaseException:
            await group.stop()
            raise
        return group

    @property
    def process_ids(self) -> dict[str, int]:
        """Process ids by worker: `draft`, `target-0`, `target-1`, ... as far as they are there."""
        found = {} if self._draft is None else {"draft": self._draft.presences[0].pid}
        if self._target is not None:
            found |= {f"target-{rank}": presence.pid for rank, presence in enumerate(self._target.presences)}
        return found

    async def check_health(self) -> None:
        """Return if the target can take rounds.

        Raises:
            TargetError: a rank is lost or does not answer.
        """
        crew = self._target
        if crew is None or not self._remote_verifier.is_available:
            raise TargetError("the target is not running")
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await asyncio.gather(*(actor.ping.remote() for actor in crew.actors))
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise TargetError(f"a target rank does not answer: {error}") from error

    async def recover(self) -> None:
        """Start all target ranks anew, if any of them is lost; their KV cache is empty afterwards.

        Raises:
            TargetError: they could not be started; it may be tried again.
            ModelError: the target does not fit any more.
        """
        async with self._recovering:
            if self._remote_verifier.is_available:
                return
            limit_s = self.config.start_timeout_s
            try:
                async with asyncio.timeout(limit_s):
                    await self._own(self._start_target())
            except TimeoutError as error:
                raise TargetError(f"the target did not restart within {limit_s:g} s") from error
            except asyncio.CancelledError as error:
                if self._is_stopped:
                    raise TargetError("the group was stopped") from error
                raise
            logger.info("Target restarted")

    async def stop(self) -> None:
        """Kill all workers and give the resources back; calling it again does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._remote_drafter.disconnect("the group was stopped")
        self._remote_verifier.disconnect("the group was stopped")
        for crew in (self._draft, self._target):
            if crew is not None:
                crew.dismiss()
        self._draft = self._target = None
        if self._owns_placement:
            ray.util.remove_placement_group(self._placement)

    async def _start_all(self) -> None:
        starting: list[Coroutine[None, None, None]] = [self._start_target()]
        if self.config.draft is not None:
            starting += [
                self._start_draft(),
                asyncio.to_thread(check_same_vocabulary, self.config.target, self.config.draft),
            ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for coroutine in starting:
                    tasks.create_task(coroutine)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start_target(self) -> None:
        config = self.config
        if self._target is not None:
            self._target.dismiss()
            self._target = None
            # The engine's block tables outlive the ranks: the new ones must have the same blocks, block 0 aside.
            config = replace(config, engine=replace(config.engine, num_blocks=self.num_blocks - 1))
        crew = await start_target(config, self._placement, self._credentials, next(self._versions))
        self._target = crew
        self.target_info = crew.loaded[0].info
        self.num_blocks = min(loaded.num_blocks for loaded in crew.loaded)
        self._remote_verifier.vocab_size = self._remote_drafter.vocab_size = self.target_info.vocab_size
        self._remote_verifier.connect(crew.links)
        self._own(self._watch_target(crew))

    async def _start_draft(self) -> None:
        crew = await start_draft(self.config, self._placement, self._credentials, next(self._versions))
        self._draft = crew
        self.draft_info = crew.loaded[0].info
        self._remote_drafter.connect(crew.links[0])
        self._own(self._watch_draft(crew))

    async def _watch_target(self, crew: Crew) -> None:
        reason = await crew.ended()
        if crew is self._target:
            logger.warning("A target rank was lost: %s", reason)
            self._remote_verifier.disconnect(f"a target rank was lost: {reason}")

    async def _watch_draft(self, crew: Crew) -> None:
        reason = await crew.ended()
        self._draft = None
        logger.warning("Draft worker lost, decoding without drafts: %s", reason)
        self._remote_drafter.disconnect(reason)
        crew.dismiss()
        pause_s = _FIRST_RETRY_S
        while self._draft is None:
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(self.config.start_timeout_s):
                    await self._start_draft()
            except (TimeoutError, TargetError, ModelError) as error:
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
                logger.warning("Draft worker did not restart, next try in %g s: %s", pause_s, error)

    def _own(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _make_placement(config: GroupConfig) -> PlacementGroup:
    resources: dict[str, float] = ray.cluster_resources()
    bundles = placement_bundles(config, num_gpus=resources.get("GPU", 0))
    placement: PlacementGroup = ray.util.placement_group(bundles, strategy=STRATEGY)
    return placement
