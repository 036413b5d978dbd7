"""PoolWorker: holds the draft model once, and serves several Routers.

Each lease has a server of its own, which one client may connect to. One thread computes and waits on all sockets.
"""

import itertools
import logging
import math
import os
import selectors
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.config import DRAFT_CORES, GroupConfig, suited_to_models
from cluster.transport import Endpoint, Server
from engine.config import ModelInfo
from engine.errors import TargetError
from engine.execution.memory import plan_cache
from engine.models.registry import open_model

if TYPE_CHECKING:
    from cluster.workers.draft_pool import DraftPool
    from engine.execution.backend import Backend

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""A lease ends after a silence of so many seconds: its Router sends at least a ping each second."""
_GROUPS_PER_WORKER = 4
"""A pass has room for the rows of so many groups, and the cache for their contexts of full length, at most."""
_USED_S = 5.0
"""Utilisation forgets with this time constant."""
_TICK_S = 0.05
"""How long a new lease waits until it is served, and an ended one until it is closed, at most."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A Router's use of one draft worker of the pool; it ends when the Router has been silent for a while.

    Attributes:
        worker: the id of the worker's process.
        version: of this lease; the worker ignores messages of another.
    """

    worker: str
    version: int
    endpoint: Endpoint
    info: ModelInfo


@dataclass(slots=True, eq=False)
class _Client:
    """A lease as the worker keeps it: its server, its most rows, and when its Router was last heard."""

    version: int
    server: Server
    num_rows: int
    heard: float
    is_served: bool = False
    has_ended: bool = False


class PoolWorker:
    """One worker of the draft pool, in a process that others start, scale and watch.

    `load` and `serve` block, `serve` in a thread of its own; everything else may be called from other threads.
    """

    def __init__(self, config: GroupConfig, worker: str, *, host: str, node_id: str) -> None:
        """Make a worker with this id, which will listen on `host`, an address of the node with Ray's id `node_id`."""
        self._config, self._worker, self._host, self._node_id = config, worker, host, node_id
        self._pool: DraftPool
        self._backend: Backend
        self._versions = itertools.count(1)
        self._clients: list[_Client] = []
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._used = self._noted = 0.0
        self._working_since: float | None = None

    def load(self) -> ModelInfo:
        """Load the draft with a cache of all memory of its device; raise ModelError if it cannot be served."""
        from cluster.workers.draft_pool import DraftPool
        from engine.drafting.assembly import assemble
        from engine.execution.registry import survey

        assert self._config.draft is not None, "a pool has a draft model"
        draft = replace(self._config.draft, num_threads=self._config.draft.num_threads or DRAFT_CORES)
        source, target = open_model(draft), open_model(self._config.target)
        config = suited_to_models(self._config, target, source)
        num_seqs = config.engine.max_num_seqs
        num_states = config.engine.num_states or 2 * num_seqs + 4
        engine = replace(config.engine, max_num_seqs=_GROUPS_PER_WORKER * num_seqs, num_states=num_states)
        surveyed = survey(source, engine)
        cache = plan_cache(surveyed.free_bytes, [surveyed.footprint], engine, device=surveyed.device)
        engine = replace(engine, **cache._asdict())
        has_time = surveyed.device != "cpu" or (os.cpu_count() or 1) > 2
        run_ahead = config.run_ahead == "on" or (config.run_ahead == "auto" and has_time)
        run_ahead = run_ahead and engine.verification in config.method.runs_ahead
        loaded = assemble(target, source, engine).load_draft(run_ahead=run_ahead)
        self._pool, self._backend, self._engine = DraftPool(loaded, engine), loaded.backend, engine
        self._backend.warm_up()
        return self._backend.info

    def lease(self, identity: str, num_rows: int) -> Lease:
        """Lease this worker to the client with this identity; raise TargetError if there is no room for `num_rows`.

        There is room if each lease can have a context of full length, and each row a block.
        """
        info, engine = self._backend.info, self._engine
        assert engine.num_blocks is not None
        length = min(info.max_model_len, engine.max_model_len or info.max_model_len) + engine.num_speculative_tokens
        blocks_per_context = -(-length // engine.block_size)
        with self._lock:
            rows = [one.num_rows for one in self._leased]
            needed, num_blocks = sum(blocks_per_context + count for count in (*rows, num_rows)), engine.num_blocks
            if self._is_closing.is_set():
                raise TargetError(f"draft worker {self._worker} ends")
            if needed > num_blocks:
                needs = f"{len(rows)} leases and one of {num_rows} rows need {needed}"
                raise TargetError(f"draft worker {self._worker} has {num_blocks} KV blocks; {needs}")
            version, server = next(self._versions), Server(self._host, self._node_id, identity)
            self._clients.append(_Client(version, server, num_rows, time.monotonic()))
        return Lease(self._worker, version, server.endpoint, info)

    def end_one(self) -> None:
        """End the latest lease, so that its Router takes another, which may be of a worker with fewer."""
        with self._lock:
            for client in self._leased[-1:]:
                client.has_ended = True

    @property
    def num_leases(self) -> int:
        """How many Routers use this worker."""
        with self._lock:
            return len(self._leased)

    @property
    def _leased(self) -> list[_Client]:
        return [client for client in self._clients if not client.has_ended]

    @property
    def utilisation(self) -> float:
        """The share of time in which this worker drafted lately, from 0 to 1."""
        return self._used * math.exp((self._noted - time.monotonic()) / _USED_S)

    @property
    def num_proposals(self) -> int:
        """How many proposals were drafted since the start."""
        return self._pool.num_proposals

    @property
    def num_passes(self) -> int:
        """In how many batches of proposals that was."""
        return self._pool.num_batches

    def check(self) -> None:
        """Raise TargetError if a pass of the model hangs."""
        since, limit_s = self._working_since, self._config.hang_timeout_s
        if since is not None and time.monotonic() - since > limit_s:
            raise TargetError(f"draft worker {self._worker} computes for longer than {limit_s:g} s")

    def serve(self) -> None:
        """Answer proposals until `close`; an error that ends it is raised, and ends all leases."""
        self._backend.enter_thread()
        is_working = False
        with selectors.DefaultSelector() as selector:
            try:
                while not self._is_closing.is_set():
                    events = selector.select(0 if is_working else _TICK_S)
                    self._working_since = started = time.monotonic()
                    self._update_leases(selector, started)
                    for client in [key.data for key, _ in events if not key.data.has_ended]:
                        for request in client.server.receive():
                            client.heard = started
                            self._pool.submit(client.version, request, client.server.send)
                    if events or is_working:
                        is_working = self._pool.step()
                        self._note_use(started)
                    self._working_since = None
            finally:
                self.close()
                for client in self._clients:
                    client.server.stop()

    def close(self) -> None:
        """End all leases, and make `serve` return."""
        self._is_closing.set()

    def _update_leases(self, selector: selectors.BaseSelector, now: float) -> None:
        """Serve new leases, and end those whose Router is silent."""
        for client in list(self._clients):
            if not client.is_served:
                client.is_served = True
                self._pool.join(client.version, 4 * client.num_rows)
                selector.register(client.server.selectable, selectors.EVENT_READ, client)
            elif client.has_ended or now - client.heard > LEASE_S:
                reason = "it was ended" if client.has_ended else f"its Router was silent for {LEASE_S:g} s"
                logger.info("Lease %d ended: %s", client.version, reason)
                client.has_ended = True
                selector.unregister(client.server.selectable)
                client.server.stop()
                self._pool.leave(client.version)
                with self._lock:
                    self._clients.remove(client)

    def _note_use(self, started: float) -> None:
        now = time.monotonic()
        self._used = self.utilisation + 1 - math.exp((started - now) / _USED_S)
        self._noted = now
