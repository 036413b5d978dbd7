"""Router: owns the sequences, runs the engine over its speculation group, and sends committed tokens to Ingresses."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from msgspec import structs
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import GroupConfig
from cluster.group import SpeculationGroup
from cluster.transport import InboxAddress
from deployments.observe.logs import in_background, limited_start, set_log_format
from deployments.observe.metrics import ReplicaMetrics, RouterMetrics
from deployments.ray_internals import bind_replica
from deployments.router.delivery import Delivery
from deployments.router.pooled_drafts import ServeLeases
from deployments.router.round_loop import RoundLoop
from deployments.routing.prefixes import landmarks
from deployments.sections import pool_config
from deployments.wire import (
    ANSWER_S,
    IS_RECOVERING,
    NUM_REQUESTS,
    REPORT_INTERVAL_S,
    SENT_ERRORS,
    Description,
    End,
    Generation,
    ModelLimits,
    Report,
    target_id,
)
from engine.config import CompileProgress
from engine.engine import Engine
from engine.errors import QueueFullError, TargetError
from engine.models.registry import refused_fields

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows


class WrongTargetError(TargetError):
    """The request is for another target than this Router's."""


class Router:
    """One replica: one engine, one speculation group."""

    async def __init__(  # type: ignore[misc]
        self, config: GroupConfig, drafts: DeploymentHandle[Any] | None = None
    ) -> None:
        """Place and load the group; raise what `SpeculationGroup.start` raises. `drafts` is the draft pool's handle."""
        self._exit = AsyncExitStack()
        set_log_format(config.log_format)
        bind_replica()
        leases = None if drafts is None else ServeLeases(drafts, pool_config(config).target)
        with limited_start(config.start_timeout_s):
            await self._start(config, leases)

    async def _start(self, settings: GroupConfig, leases: ServeLeases | None) -> None:
        started = time.monotonic()
        drafts = (settings.draft.path, *settings.draft.others) if settings.draft else ()
        draft = settings.target.head or ", ".join(drafts) or "(none)"
        logger.info("loading the target %s and the draft %s", settings.target.path, draft)
        self._group = await SpeculationGroup.start(settings, leases)
        self._exit.push_async_callback(self._group.stop)
        target = self._group.target_info
        self._engine = Engine(
            replace(settings.engine, num_states=self._group.num_states),
            target,
            drafter=self._group.drafter,
            verifier=self._group.remote_verifier,
            num_blocks=self._group.num_blocks,
            tokenizer=self._group.target_source.tokenizer,
            overlaps=self._group.config.overlaps,
        )
        links = self._group.remote_drafter, self._group.remote_verifier
        self._metrics = RouterMetrics(self._engine, *links, has_draft=settings.method.runs_in != "router")
        self._deliveries: dict[InboxAddress, Delivery] = {}
        self._prefixes: set[int] = set()
        self._exit.callback(self._disconnect)
        self._loop = RoundLoop(self._engine, self._group, self._metrics, round_timeout_s=2 * settings.round_timeout_s)
        self._exit.push_async_callback(self._loop.stop)
        self._id = serve.get_replica_context().replica_tag
        self._exit.callback(in_background(self._keep_reporting(), name="report to Ingresses").cancel)
        self._description = Description(
            target=target,
            draft=None,
            limits=ModelLimits(
                target.vocab_size,
                self._engine.max_model_len,
                settings.engine.num_speculative_tokens,
                refused=refused_fields(target),
            ),
            capacity=settings.engine.max_num_seqs + settings.engine.max_queued_requests,
            target_id=target_id(settings.target),
            draft_model=draft if settings.has_draft_worker else None,
            head=None if settings.has_draft_worker else settings.target.head,
        )
        logger.info("ready after %.1f s", time.monotonic() - started)

    async def compiling(self) -> CompileProgress | None:
        """Return how far the compiling of the models is; None if they are compiled, or run eagerly."""
        return self._group.compiling

    async def subscribe(self, inbox: InboxAddress) -> None:
        """Connect to an Ingress's inbox and send it reports, unless it is connected."""
        self._delivery(inbox)

    async def generate(self, request: Generation, inbox: InboxAddress) -> AsyncGenerator[None, None]:
        """Generate a request's tokens, and send them, or the error that ends it, to its Ingress's inbox.

        The call lasts as long as the request, because Serve drains and scales replicas by calls; closing it aborts the
        request. It is a generator, because Serve then reports at once that a replica has accepted the call; it yields
        once, because gRPC may drop the metadata of a stream without messages.
        """
        delivery = self._delivery(inbox)
        try:
            if request.target_id not in (None, served := self._description.target_id):
                raise WrongTargetError(f"this Router serves {served}, the request is for another target")
            if self._engine.config.enable_prefix_caching:
                self._prefixes |= landmarks(request.prefixes)
            with delivery.stream(request) as stream:
                await self._loop.generate(stream)
        except SENT_ERRORS as error:
            is_refused = isinstance(error, QueueFullError | WrongTargetError)
            delivery.end(End.by(error, request.request_id, self._id if is_refused else None))
        yield

    async def describe(self) -> Description:
        return replace(self._description, draft=self._group.draft_info)

    async def collect(self) -> ReplicaMetrics:
        return ReplicaMetrics(self._id, self._metrics.collect())

    async def kill(self, process: str) -> bool:
        """Kill this process (router), or a worker's (draft, target); return whether that process exists."""
        if process != "router":
            return await self._group.kill(process)
        asyncio.get_running_loop().call_later(ANSWER_S, os.kill, os.getpid(), signal.SIGKILL)
        return True

    async def check_health(self) -> None:
        """Serve's health check: replace a replica that cannot restart its target."""
        self._loop.check()
        if not self._engine.has_work and not self._group.is_available:  # a running round notices by itself
            self._loop.report_loss(TargetError("it was lost between two requests"))

    def record_autoscaling_stats(self) -> dict[str, int]:
        """Report the queue depth, and whether the target is down, to Serve's autoscaler."""
        return {NUM_REQUESTS: self._engine.num_requests, IS_RECOVERING: int(not self._group.is_available)}

    def _delivery(self, address: InboxAddress) -> Delivery:
        delivery = self._deliveries.get(address)
        if delivery is None or delivery.is_lost:
            delivery = self._deliveries[address] = Delivery(address)
        return delivery

    @property
    def _problem(self) -> str | None:
        try:
            self._loop.check()
        except TargetError as error:
            return str(error)
        return None if self._group.is_available else "the target is being restarted"

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            self._report()
            self._metrics.watch_draft()

    def _report(self) -> None:
        self._deliveries = {address: entry for address, entry in self._deliveries.items() if not entry.is_lost}
        deliveries = self._deliveries.values()
        report = Report(
            router=self._id,
            problem=self._problem,
            num_requests=self._engine.num_requests,
            drain_rate=round(self._loop.drain_rate.per_s, 1),
            num_ingresses=sum(delivery.has_requested for delivery in deliveries),
            target_id=self._description.target_id,
            compiling=self._group.compiling,
            prefixes=tuple(self._prefixes),
        )
        self._prefixes.clear()
        unstarted_ids = frozenset(self._engine.scheduler.unstarted_ids)
        for delivery in deliveries:
            movable = delivery.movable(unstarted_ids)
            delivery.report(structs.replace(report, num_yours=delivery.num_sequences, movable=movable))

    def _disconnect(self) -> None:
        for delivery in self._deliveries.values():
            delivery.close()

    async def __del__(self) -> None:
        await self._exit.aclose()
