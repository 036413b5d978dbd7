"""DraftWorker and TargetWorker: the Ray actors. Shells around a responder and a socket.

Each goes through `listen`, `load` and `serve`. `serve` lasts as long as the worker does and runs in its own thread of
the actor, so that the reference to it is the death notice, while pings are still answered.

The Router names these classes and holds no tensors, so what needs torch is imported where a worker comes to it.
"""

import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from cluster.transport.endpoint import Endpoint
from cluster.transport.server import Server
from cluster.workers.responder import DraftResponder, TargetResponder
from engine.config import EngineConfig, ModelConfig, ModelInfo

if TYPE_CHECKING:
    from cluster.workers.tensor_parallel import StoreAddress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Presence:
    """Where a worker is and how it is reached."""

    endpoint: Endpoint
    node_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker holds after loading; block 0 is counted in `num_blocks`."""

    info: ModelInfo
    num_blocks: int


def show_progress() -> None:
    """Write what this process loads to stderr, which Ray shows to whoever started the application."""
    logging.basicConfig(format="%(levelname)s %(asctime)s -- %(message)s", force=True)
    for package in ("cluster", "engine"):
        logging.getLogger(package).setLevel(logging.INFO)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Import without garbage collections: an eighth of the time goes into them, and what modules hold is no garbage.

    Later ones leave it out, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class Worker:
    """What both workers share: a socket, a thread that serves it, and a pulse."""

    def __init__(self, engine: EngineConfig, version: int) -> None:
        show_progress()
        self._engine = engine
        self._version = version
        # Running, preempted and just ended requests; what leaves the table too early is sent again.
        self._capacity = 4 * engine.max_num_seqs

    def listen(self, client_certificate: str) -> Presence:
        """Open the doors to the one client that holds this certificate."""
        self._host = ray.util.get_node_ip_address()
        self._server = Server(self._host, client_certificate)
        return Presence(self._server.endpoint, ray.get_runtime_context().get_node_id(), os.getpid())

    def ping(self) -> None:
        """Return at once: the process lives."""


class DraftWorker(Worker):
    """Holds the draft's weights and a cache of committed prefixes; decides nothing that reaches a client."""

    def load(self, config: ModelConfig, target: ModelConfig, *, run_ahead: bool) -> Loaded:
        """Load the draft; ids beyond the target's vocabulary are never drafted."""
        with _importing():
            from cluster.workers.loading import load_drafter

        drafter, info = load_drafter(config, target, self._engine, run_ahead=run_ahead)
        self._responder = DraftResponder(drafter, capacity=self._capacity, version=self._version)
        return Loaded(info, 0)

    def serve(self) -> None:
        """Answer proposals for as long as the worker lives."""
        self._server.serve(self._responder.answer, self._responder.work)


class TargetWorker(Worker):
    """One rank of the target: its shard of the weights and of the KV blocks."""

    def __init__(self, engine: EngineConfig, version: int, rank: int, world_size: int) -> None:
        super().__init__(engine, version)
        self._rank = rank
        self._world_size = world_size

    def open_store(self, timeout_s: float) -> "StoreAddress":
        """Open the store of this version's world; rank 0 only."""
        with _importing():
            from cluster.workers.tensor_parallel import open_store

        self._store, address = open_store(self._host, self._world_size, timeout_s)
        return address

    def load(self, config: ModelConfig, address: "StoreAddress | None", timeout_s: float) -> Loaded:
        """Load this rank's shard; with more than one rank, enter the world whose store is at `address` first."""
        with _importing():
            from cluster.workers.loading import load_verifier
            from cluster.workers.tensor_parallel import join_store, join_world
            from engine.models.causal_lm import resolve_device

        shard = None
        if address is not None:
            store = self._store if self._rank == 0 else join_store(address, self._world_size, timeout_s)
            shard = join_world(
                store,
                rank=self._rank,
                world_size=self._world_size,
                device=resolve_device(config.device),
                host=self._host,
                timeout_s=timeout_s,
            )
        verifier, info = load_verifier(config, self._engine, shard=shard)
        self._responder = TargetResponder(verifier, rank=self._rank, capacity=self._capacity, version=self._version)
        return Loaded(info, verifier.num_blocks)

    def serve(self) -> None:
        """Verify for as long as the worker lives; a failure ends it, because the other ranks cannot go on without."""
        from cluster.workers.tensor_parallel import leave_world

        try:
            self._server.serve(self._responder.answer)
        finally:
            leave_world()
