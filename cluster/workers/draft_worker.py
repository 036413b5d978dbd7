"""DraftWorker: holds the draft model, and drafts for every Router that leases it.

Each lease has a listener of its own, which one client may connect to. One thread computes and waits on all sockets.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.config import GroupConfig
from cluster.protocol.messages import AnyRequest
from cluster.transport import Endpoint, Listener, Server
from cluster.workers.actors import Worker, importing
from engine.config import ModelInfo
from engine.errors import ModelError, TargetError
from engine.execution.memory import CacheSize, plan_cache, with_learner

if TYPE_CHECKING:
    from cluster.workers.draft_queue import DraftQueue
    from engine.drafting.learning.study import Study
    from engine.drafting.model.feature_store import FeatureStore

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""A lease ends after so long a silence: its Router sends at least a ping each second."""
_USED_S = 5.0
"""Time constant of the moving average in `utilisation`."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A Router's use of a draft worker, which ignores messages with another `version`."""

    worker: str
    version: int
    endpoint: Endpoint
    info: ModelInfo


@dataclass(slots=True, eq=False)
class _Held:
    lease: Lease
    identity: str
    listener: Listener
    num_rows: int
    heard: float
    is_ended: bool = False


class DraftWorker(Worker):
    """Holds the weights of drafts, and caches of committed prefixes; decides nothing that reaches a client.

    `load` and `serve` block, `serve` in a thread of its own; everything else may be called from other threads.
    """

    def __init__(
        self, config: GroupConfig, name: str, *, max_groups: int = 1, node: tuple[str, str] | None = None
    ) -> None:
        """Make a worker whose passes have room for the rows of `max_groups` groups."""
        engine = config.engine
        if max_groups > 1:
            num_seqs = max_groups * engine.max_num_seqs
            engine = replace(engine, max_num_seqs=num_seqs, num_states=engine.wanted_states)
        super().__init__(engine, node)
        self._config, self._name, self._max_groups = config, name, max_groups
        self._queue: DraftQueue
        self._features: FeatureStore
        self._feature_server: Server | None = None
        self._leases: dict[int, _Held] = {}
        self._num_leases = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self._study: Study | None = None
        self._used = self._noted = self._drafted_s = 0.0
        self._working_since: float | None = None

    def load(self, cache: CacheSize | None = None) -> ModelInfo:
        """Load the drafts; raise ModelError if one cannot be served. Without `cache`, they may use the whole device."""
        with importing():
            from cluster.workers.draft_queue import DraftQueue
            from engine.drafting.assembly import assemble
            from engine.drafting.learning.head_learner import HeadLearner
            from engine.drafting.learning.learner import Learner
            from engine.drafting.learning.study import Study
            from engine.drafting.model.feature_store import FeatureStore

        config = self._config
        assert config.draft is not None, "every method of a draft worker loads a model"
        if cache is None:
            surveyed = self.survey(config.draft)
            footprint = with_learner(surveyed.footprint, config.draft_learning)
            cache = plan_cache(surveyed.free_bytes, [footprint], self._engine, device=surveyed.device)
        self._engine, self._features = replace(self._engine, **cache._asdict()), FeatureStore()
        source, target = self._open(config.draft), self._open(config.target)
        assembly = assemble(target, source, self._engine)
        drafts = assembly.load_drafts(run_ahead=config.run_ahead == "on", features=self._features)
        self._backends = [draft.backend for draft in drafts]
        if config.draft_learning == "on":
            if assembly.shared_ids[0] is not None:
                raise ModelError(f"draft_learning is on, but {config.draft.path} has another tokenizer than the target")
            learner = HeadLearner if assembly.method.reads_features else Learner
            self._study = Study(
                learner(drafts[0].backend, config.engine.num_speculative_tokens),
                share=config.draft_learning_share,
                path=config.draft_learning_path,
                draft=(source.head or source).digest,
                drafted_s=lambda: self._drafted_s,
            )
        capacity, is_shared = 4 * config.engine.max_num_seqs, self._max_groups > 1
        self._queue = DraftQueue(drafts, self._engine, capacity=capacity, is_shared=is_shared, study=self._study)
        for backend in self._backends:
            backend.warm_up()
        infos = [backend.info for backend in self._backends]
        self._info = replace(
            infos[0],
            name=", ".join(info.name for info in infos),
            num_parameters=sum(info.num_parameters for info in infos),
            max_model_len=max(info.max_model_len for info in infos),
        )
        return self._info

    def lease(self, identity: str, num_rows: int) -> Lease:
        """Lease this worker to the client with this identity, or go on with its lease.

        Raises TargetError if other leases leave no blocks for a full context and a block for each row.
        """
        assert self._backends, "load comes first"
        info, engine = self._info, self._engine
        assert engine.num_blocks is not None
        length = min(info.max_model_len, engine.max_model_len or info.max_model_len) + engine.num_speculative_tokens
        blocks_per_context = -(-length // engine.block_size)
        with self._lock:
            if self._is_closing:
                raise TargetError(f"draft worker {self._name} ends")
            leased = self._leased
            if (held := next((held for held in leased if held.identity == identity), None)) is not None:
                held.heard = time.monotonic()
                return held.lease
            needed = sum(blocks_per_context + count for count in (*(held.num_rows for held in leased), num_rows))
            if leased and needed > engine.num_blocks:
                needs = f"{len(leased)} leases and one of {num_rows} rows need {needed}"
                raise TargetError(f"draft worker {self._name} has {engine.num_blocks} KV blocks; {needs}")
            self._num_leases += 1
            version = self._num_leases
            listener = self._server.listen(identity, functools.partial(self._answer, version))
            lease = Lease(self._name, version, listener.endpoint, info)
            self._leases[version] = _Held(lease, identity, listener, num_rows, time.monotonic())
        return lease

    def end_one(self) -> None:
        """End the latest lease, so that its Router may lease a worker with fewer leases."""
        with self._lock:
            for held in self._leased[-1:]:
                held.is_ended = True
        self._server.wake()

    @property
    def num_leases(self) -> int:
        with self._lock:
            return len(self._leased)

    @property
    def utilisation(self) -> float:
        """The share of time in which this worker drafted lately, from 0 to 1."""
        return self._used * math.exp((self._noted - time.monotonic()) / _USED_S)

    @property
    def num_proposals(self) -> int:
        return self._queue.num_proposals

    @property
    def num_passes(self) -> int:
        return self._queue.num_batches

    @property
    def learned(self) -> Mapping[str, float]:
        """The counters of learning; empty without."""
        return {} if self._study is None else self._study.counts

    def check(self) -> None:
        """Raise TargetError if a pass of the model hangs."""
        since, limit_s = self._working_since, self._config.hang_timeout_s
        if since is not None and time.monotonic() - since > limit_s:
            raise TargetError(f"draft worker {self._name} computes for longer than {limit_s:g} s")

    def receive_features(self, lease: Lease, identity: str) -> Endpoint:
        """Accept a lease's features only from the rank 0 with this identity; return where that rank connects."""
        from cluster.workers.features import receiver

        if self._feature_server is not None:
            self._feature_server.close()
        self._feature_server = server = Server(self._host, self._node_id)
        listener = server.listen(identity, receiver(self._features, f"{lease.version}/"))
        threading.Thread(target=server.serve, name="features", daemon=True).start()
        return listener.endpoint

    def serve(self) -> None:
        """Draft until `close`; an error that ends it is raised, and ends all leases."""
        assert self._backends, "load comes first"
        for backend in self._backends:
            backend.enter_thread()
        if self._study is not None:
            self._study.start()
        try:
            self._server.serve(self._work)
        finally:
            self.close()

    def close(self) -> None:
        self._is_closing = True
        if self._study is not None:
            self._study.close()
        self._server.close()

    @property
    def _leased(self) -> list[_Held]:
        since = time.monotonic() - LEASE_S
        return [held for held in list(self._leases.values()) if held.heard > since and not held.is_ended]

    def _answer(self, version: int, request: AnyRequest) -> None:
        held = self._leases[version]
        held.heard = time.monotonic()
        self._queue.submit(version, request, held.listener.send)

    def _work(self) -> bool:
        self._working_since = started = time.monotonic()
        self._forget_ended()
        is_working = self._queue.step()
        now = time.monotonic()
        self._drafted_s += now - started
        self._used, self._noted = self.utilisation + 1 - math.exp((started - now) / _USED_S), now
        self._working_since = None
        return is_working

    def _forget_ended(self) -> None:
        if len(self._leased) == len(self._leases):
            return
        with self._lock:
            leased = self._leased  # again, because a lease may have been given meanwhile
            for version, held in list(self._leases.items()):
                if held not in leased:
                    logger.info("Lease %d ended", version)
                    del self._leases[version]
                    self._queue.leave(version)
                    self._server.forget(held.listener)
