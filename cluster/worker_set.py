"""Crew: one incarnation of the draft worker or of the target's ranks, from its first actor to its last."""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup

from cluster.config import GroupConfig
from cluster.placement import DRAFT_BUNDLE, actor_options, target_bundle
from cluster.transport.channel import Channel
from cluster.transport.credentials import Credentials
from cluster.workers.actors import DraftWorker, Loaded, Presence, TargetWorker
from engine.errors import ModelError, TargetError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Crew:
    """Workers that were started together and are given up together."""

    name: str
    actors: list[Any]
    presences: list[Presence] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)
    links: list[Channel] = field(default_factory=list)
    serving: list[Any] = field(default_factory=list)

    async def meet(self, credentials: Credentials, version: int) -> None:
        """Learn where the workers are, and begin to connect to each."""
        self.presences = await _results([actor.listen.remote(credentials.certificate) for actor in self.actors])
        node_id = ray.get_runtime_context().get_node_id()
        for presence in self.presences:
            endpoint = presence.endpoint
            if presence.node_id != node_id:
                endpoint = endpoint._replace(path="")  # there, that path is somebody else's
            self.links.append(Channel(endpoint, credentials, version=version))

    def serve(self) -> None:
        """Let the workers serve."""
        self.serving = [actor.serve.remote() for actor in self.actors]
        for rank, presence in enumerate(self.presences):
            logger.info("%s %d: process %d on node %s", self.name, rank, presence.pid, presence.node_id)

    async def ended(self) -> str:
        """Wait until the first of the workers has ended, and return why it did."""
        waiting = [asyncio.create_task(_outcome(reference)) for reference in self.serving]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

    def dismiss(self) -> None:
        """Close the connections and kill the processes."""
        for link in self.links:
            link.close()
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


async def start_draft(config: GroupConfig, placement: PlacementGroup, credentials: Credentials, version: int) -> Crew:
    """Start the draft worker and wait until it has loaded.

    Raises:
        ModelError: the model cannot be served.
        TargetError: the worker died.
    """
    assert config.draft is not None, "every method of a draft worker loads a model"
    actor_class = ray.remote(DraftWorker).options(**actor_options(placement, DRAFT_BUNDLE))
    crew = Crew("draft worker", [actor_class.remote(config.engine, version)])
    try:
        [actor] = crew.actors
        await crew.meet(credentials, version)
        crew.loaded = await _results(
            [actor.load.remote(config.draft, config.target, run_ahead=config.run_ahead == "on")]
        )
        crew.serve()
    except BaseException:
        crew.dismiss()
        raise
    return crew


async def start_target(config: GroupConfig, placement: PlacementGroup, credentials: Credentials, version: int) -> Crew:
    """Start all ranks of the target, in a torch.distributed world of their own, and wait until all have loaded.

    Raises:
        ModelError: the model cannot be served.
        TargetError: a rank died.
    """
    size, timeout_s = config.tensor_parallel_size, config.start_timeout_s
    actor_class = ray.remote(TargetWorker)
    crew = Crew(
        "target rank",
        [
            actor_class.options(**actor_options(placement, target_bundle(config, rank))).remote(
                config.engine, version, rank, size
            )
            for rank in range(size)
        ],
    )
    try:
        await crew.meet(credentials, version)
        address = None
        if size > 1:
            _warn_if_apart(crew.presences)
            [address] = await _results([crew.actors[0].open_store.remote(timeout_s)])
        crew.loaded = await _results([actor.load.remote(config.target, address, timeout_s) for actor in crew.actors])
        crew.serve()
    except BaseException:
        crew.dismiss()
        raise
    return crew


def _warn_if_apart(presences: list[Presence]) -> None:
    num_nodes = len({presence.node_id for presence in presences})
    if num_nodes > 1:
        logger.warning(
            "The target's %d ranks are on %d nodes; every layer waits for the network between them",
            len(presences),
            num_nodes,
        )


async def _results(references: list[Awaitable[T]]) -> list[T]:
    """Wait for Ray's results; the one place where its exceptions become ours."""
    try:
        return list(await asyncio.gather(*references))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ModelError):
            raise error.cause from None
        raise TargetError(f"a worker failed to start: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise TargetError(f"a worker died while starting: {error}") from error


async def _outcome(reference: Awaitable[None]) -> str:
    try:
        await reference
    except ray.exceptions.RayTaskError as error:
        return repr(error.cause)
    except ray.exceptions.RayError as error:
        return str(error).splitlines()[0]
    return "it stopped"
