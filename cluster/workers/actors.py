"""Worker and TargetWorker: the Ray actors of the target's ranks, and what they share with a draft worker.

A `WorkerSet` calls `begin`, then a rank's `listen`, `survey` (at the first start), `load` and `serve` in this order.
`serve` returns when the worker ends. Each call has a thread, so an actor that loads or serves still answers pings.

The Router imports this module but must not import torch, so methods import torch.
"""

import contextlib
import gc
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ray

from cluster.config import LogFormat
from cluster.ray_core import stderr_handler
from cluster.transport import Connector, Endpoint, Server
from cluster.workers.responder import TargetResponder
from engine.config import CompileProgress, EngineConfig, ModelConfig, ModelInfo
from engine.drafting.registry import method_of
from engine.execution.memory import CacheSize, Survey
from engine.models.registry import open_model
from engine.models.source import ModelSource

if TYPE_CHECKING:
    from engine.drafting.assembly import LoadedVerifier
    from engine.execution.backend import Backend
    from engine.execution.vllm.vllm_verifier import VllmVerifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker's process, and Ray's id of its node."""

    pid: int
    node_id: str


def show_progress(log_format: LogFormat) -> None:
    """Log to stderr, which Ray shows in the terminal that started the application."""
    logging.basicConfig(handlers=[stderr_handler(log_format)], force=True)
    for package in ("cluster", "engine"):
        logging.getLogger(package).setLevel(logging.INFO)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collections, which take an eighth of the time; later collections skip the modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def this_node() -> tuple[str, str]:
    """Return the address of this process's node, and Ray's id of the node."""
    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()


class Worker:
    """The base of both workers: surveys its device, and answers pings."""

    def __init__(self, engine: EngineConfig, node: tuple[str, str] | None = None, world_size: int = 1) -> None:
        self._host, self._node_id = node or this_node()
        self._engine = engine
        self._world_size = world_size
        self._server = Server(self._host, self._node_id)
        self._backends: Sequence[Backend | VllmVerifier] = []
        self._sources: dict[ModelConfig, ModelSource] = {}

    def begin(self, log_format: LogFormat) -> WorkerProcess:
        show_progress(log_format)
        return WorkerProcess(os.getpid(), self._node_id)

    def survey(self, config: ModelConfig, world_size: int = 1) -> Survey:
        """Measure this worker's device and a model that will be loaded there, for the memory plan."""
        with importing():
            from engine.execution.registry import survey

        self._select_gpu()
        return survey(self._open(config), self._engine, world_size=world_size)

    def _select_gpu(self) -> None:
        """Select this rank's GPU for this thread, if the rank sees all GPUs of its node."""
        if self._world_size > 1 and (assigned := ray.get_runtime_context().get_accelerator_ids().get("GPU")):
            import torch

            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            # Ray names GPUs as the node's variable does, or numbers them if it has none.
            torch.cuda.set_device(visible.split(",").index(assigned[0]) if visible else int(assigned[0]))

    def _open(self, config: ModelConfig) -> ModelSource:
        return self._sources.setdefault(config, open_model(config))

    def ping(self) -> list[CompileProgress]:
        """Return the progress of compilations; any answer shows that the process is alive."""
        return [progress for backend in self._backends for progress in backend.compiling]

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class TargetWorker(Worker):
    """One rank of the target: its shard of the weights and of the KV blocks."""

    def __init__(self, engine: EngineConfig, version: int, rank: int, world_size: int) -> None:
        super().__init__(engine, world_size=world_size)
        self._version, self._rank = version, rank

    def listen(self, client_identity: str) -> Endpoint:
        return self._server.listen(client_identity, lambda request: self._responder.answer(request)).endpoint

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the rendezvous store of this version's ranks, on rank 0 only; return its host and port."""
        with importing():
            from cluster.workers.tensor_parallel import open_store

        self._store, address = open_store(self._host, self._world_size, timeout_s)
        return address

    def load(
        self, config: ModelConfig, cache: CacheSize, address: tuple[str, int] | None, timeout_s: float
    ) -> ModelInfo:
        """Load this rank's shard with its planned cache; `address` is the ranks' store, None for a single rank."""
        with importing():
            from cluster.workers.features import FeatureSource
            from cluster.workers.tensor_parallel import join_store, join_world
            from engine.drafting.assembly import assemble
            from engine.models.loader import resolve_device

        self._select_gpu()
        world = None
        if address is not None:
            store = self._store if self._rank == 0 else join_store(address, self._world_size, timeout_s)
            world = join_world(
                store,
                rank=self._rank,
                world_size=self._world_size,
                device=resolve_device(config.device),
                host=self._host,
                timeout_s=timeout_s,
            )
        verifier = assemble(self._open(config), None, replace(self._engine, **cache._asdict())).load_verifier(world)
        self._backends = [verifier.backend]
        verifier.backend.warm_up()
        served: LoadedVerifier | FeatureSource = verifier
        if self._rank == 0 and method_of(self._engine.drafting).reads_features:
            served = self._source = FeatureSource(verifier, Connector(self._node_id), self._version)
        # Room for running, preempted and just ended requests; a prefix that is evicted too early is sent again.
        capacity = 4 * self._engine.max_num_seqs
        self._responder = TargetResponder(served, rank=self._rank, capacity=capacity, version=self._version)
        return verifier.backend.info

    def feature_identity(self) -> str:
        """Return the identity that proves this rank to the draft worker that receives its features."""
        return self._source.identity

    def send_features(self, endpoint: Endpoint) -> None:
        self._source.connect(endpoint)

    def serve(self) -> None:
        """Verify until the worker ends; any failure ends it, because the other ranks need it."""
        [backend] = self._backends
        backend.enter_thread()
        try:
            self._server.serve(self._responder.work)
        finally:
            backend.close()
