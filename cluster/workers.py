"""DraftWorker and TargetWorker: the Ray actors. Shells around a responder and a socket.

Each goes through `listen`, `load` and `serve`. `serve` lasts as long as the worker does and runs in its own thread of
the actor, so that the reference to it is the death notice, while pings are still answered.
"""

import logging
import os
import time
from dataclasses import dataclass, replace

import ray
import torch.distributed as dist

from cluster.channel import Endpoint, Server
from cluster.cores import count_cores
from cluster.responder import DraftResponder, TargetResponder
from cluster.tensor_parallel import StoreAddress, join_store, join_world, open_store
from engine.architecture import eos_token_ids, read_config
from engine.config import EngineConfig, ModelConfig
from engine.drafters.model import ModelDrafter
from engine.drafters.run_ahead import RunAheadDrafter
from engine.grammar import Grammars
from engine.model import CausalLM, ModelInfo, Shard, resolve_device
from engine.threads import fit_threads
from engine.verifier import ModelVerifier

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


class Worker:
    """What both workers share: a socket, a thread that serves it, and a pulse."""

    def __init__(self, engine: EngineConfig, version: int) -> None:
        show_progress()
        self._engine = engine
        self._version = version
        # Running, preempted and just ended requests; what leaves the table too early is sent again.
        self._capacity = 4 * engine.max_num_seqs

    def listen(self, client_key: bytes) -> Presence:
        """Open the socket to the one client that holds this key."""
        self._host = ray.util.get_node_ip_address()
        self._server = Server(self._host, client_key)
        return Presence(self._server.endpoint, ray.get_runtime_context().get_node_id(), os.getpid())

    def ping(self) -> None:
        """Return at once: the process lives."""


class DraftWorker(Worker):
    """Holds the draft's weights and a cache of committed prefixes; decides nothing that reaches a client."""

    def load(self, config: ModelConfig, target: ModelConfig, *, run_ahead: bool) -> Loaded:
        """Load the draft; ids beyond the target's vocabulary are never drafted."""
        model = _load(config)
        target_config = read_config(target)
        limit = target_config.get_text_config().vocab_size
        grammars = Grammars(target, vocab_size=limit, eos_token_ids=eos_token_ids(target, target_config))
        drafter_class = RunAheadDrafter if run_ahead else ModelDrafter
        self._drafter = drafter_class(model, self._engine, token_limit=limit, grammars=grammars)
        return Loaded(model.info, 0)

    def serve(self) -> None:
        """Answer proposals for as long as the worker lives."""
        responder = DraftResponder(self._drafter, capacity=self._capacity, version=self._version)
        self._server.serve(responder.answer, responder.work)


class TargetWorker(Worker):
    """One rank of the target: its shard of the weights and of the KV blocks."""

    def __init__(self, engine: EngineConfig, version: int, rank: int, world_size: int) -> None:
        super().__init__(engine, version)
        self._rank = rank
        self._world_size = world_size

    def open_store(self, timeout_s: float) -> StoreAddress:
        """Open the store of this version's world; rank 0 only."""
        self._store, address = open_store(self._host, self._world_size, timeout_s)
        return address

    def load(self, config: ModelConfig, address: StoreAddress | None, timeout_s: float) -> Loaded:
        """Load this rank's shard; with more than one rank, enter the world whose store is at `address` first."""
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
        model = _load(config, shard=shard)
        info = model.info
        grammars = Grammars(config, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        self._verifier = ModelVerifier(model, self._memory_share(model), grammars)
        logger.info("%d KV blocks of %d tokens", self._verifier.num_blocks, self._engine.block_size)
        return Loaded(model.info, self._verifier.num_blocks)

    def serve(self) -> None:
        """Verify for as long as the worker lives; a failure ends it, because the other ranks cannot go on without."""
        responder = TargetResponder(self._verifier, rank=self._rank, capacity=self._capacity, version=self._version)
        try:
            self._server.serve(responder.answer)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _memory_share(self, model: CausalLM) -> EngineConfig:
        """Ranks on CPU take their KV blocks from one memory."""
        if model.device.type == "cuda":
            return self._engine
        return replace(self._engine, memory_fraction=self._engine.memory_fraction / self._world_size)


def _load(config: ModelConfig, *, shard: Shard | None = None) -> CausalLM:
    """Load a model and settle its number of threads, within the cores that its share of the ranks leaves it.

    Ray would leave a worker one thread, by OMP_NUM_THREADS, whatever the machine has.
    """
    cores = count_cores(ray.get_runtime_context().get_node_id()) // (shard.world_size if shard else 1)
    model = CausalLM.load(replace(config, num_threads=config.num_threads or max(1, cores)), shard=shard)
    # Several ranks run their passes together, so they cannot try different numbers of them.
    if config.num_threads is None and model.device.type == "cpu" and cores > 1 and shard is None:
        started = time.monotonic()
        threads = fit_threads(model, cores)
        logger.info("%s runs with threads: %s, chosen in %.1f s", config.path, threads, time.monotonic() - started)
    return model
