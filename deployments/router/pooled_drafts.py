"""The draft pool: Drafts, one worker as a Serve replica, and ServeLeases, by which a Router leases a worker."""

import asyncio
import os
import random
import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray import serve

from cluster.config import GroupConfig, suited_to_models
from cluster.leases import Lease
from cluster.placement import settle_shared
from cluster.workers.draft_worker import DraftWorker
from deployments.observe.logs import in_background, limited_start, set_log_format
from deployments.observe.metrics import ReplicaMetrics, learning_metrics
from deployments.ray_internals import bind_replica
from deployments.routing.client import ask_all
from deployments.wire import ANSWER_S, UTILISATION
from engine.config import ModelConfig
from engine.errors import TargetError
from engine.models.registry import open_model

GROUPS_PER_WORKER = 4
"""How many Routers a worker has room for: their rows in a pass, their contexts of full length in the cache."""
BALANCE_PERIOD_S = 30.0  # on average, between a worker's comparisons with the other workers' leases


@dataclass(frozen=True, slots=True)
class Offer:
    """The load of a pool's worker; `utilisation` is the share of time in which it drafts."""

    worker: str
    num_leases: int
    utilisation: float


class Drafts:
    """One replica: one draft worker, in this process."""

    async def __init__(self, config: GroupConfig) -> None:  # type: ignore[misc]
        """Load the draft and begin to serve it; raise ModelError if it cannot be loaded."""
        set_log_format(config.log_format)
        bind_replica()
        self._target = config.target
        context = serve.get_replica_context()
        self._id, self._all = context.replica_tag, serve.get_deployment_handle(context.deployment, context.app_name)
        with limited_start(config.start_timeout_s):
            self._worker = await asyncio.to_thread(_loaded, config, self._id)
        self._serving = in_background(asyncio.to_thread(self._worker.serve), name="drafts")
        self._balancing = in_background(self._keep_balanced(), name="balance leases")

    async def offer(self) -> Offer:
        """Return this worker's load, by which a Router chooses."""
        return Offer(self._id, self._worker.num_leases, self._worker.utilisation)

    async def lease(self, worker: str, target: ModelConfig, identity: str, num_rows: int) -> Lease | None:
        """Lease this worker if it has this id; raise TargetError if it is full, or drafts for another target."""
        if worker != self._id:
            return None
        if target != self._target:
            raise TargetError(f"the draft worker drafts for {self._target.path}, not for {target.path}")
        return self._worker.lease(identity, num_rows)

    async def kill(self, worker: str) -> bool:
        """Kill this process if it is the worker with this id; return whether it is."""
        if worker == self._id:
            asyncio.get_running_loop().call_later(ANSWER_S, os.kill, os.getpid(), signal.SIGKILL)
        return worker == self._id

    async def collect(self) -> ReplicaMetrics:
        """Return this replica's metrics."""
        worker, name = self._worker, "paceline:draft_pool"
        passes = "Passes in which this draft worker answered proposals of one or several Routers."
        metrics: list[Metric] = [
            GaugeMetricFamily(f"{name}_leases", "Routers that lease this draft worker.", worker.num_leases),
            GaugeMetricFamily(f"{name}_utilisation", "Share of time in which it drafts, 0 to 1.", worker.utilisation),
            CounterMetricFamily(f"{name}_passes", passes, worker.num_passes),
            CounterMetricFamily(f"{name}_proposals", "Proposals that it answered.", worker.num_proposals),
        ]
        return ReplicaMetrics(self._id, [*metrics, *learning_metrics(worker.learned)])

    async def check_health(self) -> None:
        """Serve's health check: replace a replica whose worker has ended or hangs."""
        if self._serving.done():
            raise TargetError("the draft worker has ended")
        self._worker.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the share of time in which this worker drafts to Serve's autoscaler."""
        return {UTILISATION: self._worker.utilisation}

    async def _keep_balanced(self) -> None:
        """End a lease if another worker has two fewer leases: the Router then leases that worker."""
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.5) * BALANCE_PERIOD_S)
            offers = [offer for offer in await ask_all(self._all, "offer") if isinstance(offer, Offer)]
            if self._worker.num_leases >= 2 + min((offer.num_leases for offer in offers), default=0):
                self._worker.end_one()

    def __del__(self) -> None:
        if hasattr(self, "_worker"):  # it has loaded
            self._worker.close()


def _loaded(config: GroupConfig, worker: str) -> DraftWorker:
    assert config.draft is not None
    target, draft = open_model(config.target), open_model(config.draft)
    has_gpu = bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))
    config = settle_shared(suited_to_models(config, target, draft), has_gpu=has_gpu, num_cores=os.cpu_count() or 1)
    loaded = DraftWorker(config, worker, max_groups=GROUPS_PER_WORKER)
    loaded.load()
    return loaded


class ServeLeases:
    """The draft pool, as a Router sees it. Every worker is asked, because Serve's queues do not show long leases."""

    def __init__(self, drafts: Any, target: ModelConfig) -> None:
        self._drafts, self._target = drafts, target

    async def take(self, identity: str, num_rows: int, avoid: Collection[str]) -> Lease:
        offers = [offer for offer in await ask_all(self._drafts, "offer") if isinstance(offer, Offer)]
        reasons = ["no draft worker of the pool answers"]
        for offer in sorted(offers, key=lambda offer: (offer.worker in avoid, offer.num_leases, offer.utilisation)):
            answers = await ask_all(self._drafts, "lease", offer.worker, self._target, identity, num_rows)
            for answer in answers:
                if isinstance(answer, Lease):
                    return answer
            reasons += [str(answer) for answer in answers if answer is not None]
        raise TargetError(reasons[-1])

    async def kill(self, lease: Lease) -> bool:
        return True in await ask_all(self._drafts, "kill", lease.worker)
