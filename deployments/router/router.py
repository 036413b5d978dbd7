"""Router: owns the sequences, runs the engine over its own speculation group, streams committed tokens."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from ray import serve

from cluster.group import SpeculationGroup
from cluster.transport import ConnectionLostError, InboxAddress
from deployments.autoscaling import IS_RECOVERING, NUM_REQUESTS
from deployments.background import in_background
from deployments.config import AppConfig, group_config
from deployments.json_log import set_log_format
from deployments.loopback import bind_replica
from deployments.metrics import ReplicaMetrics, RouterMetrics
from deployments.ray_exporter import RayExporter
from deployments.router.delivery import Deliveries
from deployments.router.generation import (
    Description,
    Failure,
    Generation,
    ModelLimits,
    QueueReport,
    WithdrawnError,
    target_id,
)
from deployments.router.load import REPORT_INTERVAL_S
from deployments.router.round_loop import RoundLoop
from deployments.router.state import RouterState
from deployments.router.stopping import stopped_replica
from deployments.starting import watched_start
from engine.engine import Engine
from engine.errors import CapacityError, QueueFullError, RequestError, TargetError
from engine.models.tokenizer import load_tokenizer

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows


class Router:
    """One replica: one engine, one speculation group."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        """Place and load the group; the replica is ready when this returns.

        Raises:
            ModelError: a model that cannot be served.
            TargetError: the workers did not start.
        """
        set_log_format(config.log_format)
        bind_replica()
        self._replica = serve.get_replica_context().replica_tag
        with watched_start(config.hang_timeout_s, config.start_timeout_s):
            await self._start(config)

    async def _start(self, config: AppConfig) -> None:
        settings = group_config(config)
        started = time.monotonic()
        draft = settings.draft.path if settings.draft else "(none)"
        logger.info("loading the target %s and the draft %s", settings.target.path, draft)
        self._group = await SpeculationGroup.start(settings)
        target = self._group.target_info
        self._engine = Engine(
            settings.engine,
            drafter=self._group.drafter,
            verifier=self._group.verifier,
            num_blocks=self._group.num_blocks,
            vocab_size=target.vocab_size,
            max_model_len=target.max_model_len,
            eos_token_ids=target.eos_token_ids,
            decoder_start_id=target.decoder_start_id,
            tokenizer=load_tokenizer(settings.target),
        )
        self._metrics = RouterMetrics(config.model_name, self._engine, self._group.drafter)
        self._loop = RoundLoop(
            self._engine,
            self._group,
            self._metrics,
            max_recoveries=config.max_recoveries,
            round_timeout_s=config.round_timeout_s,
        )
        self._id = serve.get_replica_context().replica_id.unique_id
        self._deliveries = Deliveries()
        loss = "Ingresses are not told of the load"
        self._reporting = in_background(self._report_load(), name="reporting the load", loss=loss)
        self._exporter = RayExporter(self._collect_here)
        self._description = Description(
            target=target,
            draft=None,
            limits=ModelLimits(
                target.vocab_size,
                self._engine.max_model_len,
                settings.engine.num_speculative_tokens,
                has_encoder=target.decoder_start_id is not None,
            ),
            capacity=settings.engine.max_num_seqs + settings.engine.max_queued_requests,
            target_id=target_id(settings.target),
            draft_model=settings.draft.path if settings.draft is not None and settings.has_draft_worker else None,
        )
        logger.info("ready after %.1f s", time.monotonic() - started)

    async def generate(self, request: Generation, inbox: InboxAddress) -> AsyncGenerator[int | Failure, None]:
        """Generate a request's tokens, and send them to its Ingress's inbox; Serve closes this when the client leaves.

        Yields:
            How many outputs were sent: once, after the last one. Then, if the request has failed by its client or the
            load, was withdrawn, or is for another Router, why.

        Raises:
            TargetError: the target could not be restarted, or the inbox cannot be reached.
        """
        served = self._description.target_id
        if request.target_id not in (None, served):
            yield Failure(TargetError(f"this Router serves {served}, the request is for another target"), self._id)
            return
        delivery = self._deliveries.to(inbox)
        num_sent = 0
        try:
            with delivery.holding(request.num_choices - len(request.finished)):
                async with aclosing(self._loop.generate(request, inbox)) as rounds:
                    async for outputs in rounds:
                        await delivery.put(outputs)
                        num_sent += len(outputs)
        except ConnectionLostError as error:
            raise TargetError(f"the Ingress cannot be reached: {error}") from error
        except (RequestError, CapacityError, TimeoutError, WithdrawnError) as error:
            if num_sent:
                yield num_sent
            yield Failure(error, self._id if isinstance(error, QueueFullError) else None)
            return
        except Exception:
            if num_sent:
                yield num_sent
            raise
        yield num_sent

    async def describe(self) -> Description:
        """Return what this replica serves."""
        return replace(self._description, draft=self._group.draft_info)

    async def report_queue(self, sender: InboxAddress) -> QueueReport:
        """Return how much this replica has to do, and how much of that came from a sender and can be withdrawn."""
        waiting = self._loop.waiting
        return QueueReport(
            router_id=self._id,
            depth=self._engine.num_running + self._engine.num_waiting,
            num_movable=waiting.num_movable(),
            num_movable_of_sender=waiting.num_movable(sender),
            can_serve=self._group.is_available,
        )

    async def withdraw(self, router_id: str, sender: InboxAddress, limit: int) -> int:
        """Give back up to so many waiting sequences of a sender, if this is the replica that is meant.

        Serve can call one replica, which it chooses, or all of them.
        """
        return self._loop.withdraw(sender, limit) if router_id == self._id else 0

    async def collect(self) -> ReplicaMetrics:
        """Return this replica's metrics."""
        return self._collect_here()

    async def state(self) -> RouterState:
        """Return whether this replica can take rounds now."""
        try:
            self._loop.check()
        except TargetError as error:
            return RouterState(self._replica, str(error))
        return RouterState(self._replica, None if self._group.is_available else "the target is being restarted")

    async def check_health(self) -> None:
        """Serve's health check: a replica that cannot bring its target back is replaced."""
        self._loop.check()
        if not self._engine.has_work and not self._group.is_available:  # a round finds out by itself
            self._loop.report_loss(TargetError("it was lost between two requests"))

    def record_autoscaling_stats(self) -> dict[str, int]:
        """Report the queue depth to Serve's autoscaler, and whether the target is down."""
        return {
            NUM_REQUESTS: self._engine.num_running + self._engine.num_waiting,
            IS_RECOVERING: int(not self._group.is_available),
        }

    def _collect_here(self) -> ReplicaMetrics:
        return ReplicaMetrics(self._replica, self._metrics.collect())

    async def _report_load(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            num_requests = self._engine.num_running + self._engine.num_waiting
            leaving = self._loop.waiting.movable_ids if stopped_replica() is not None else lambda _: []
            self._deliveries.report(self._id, num_requests, self._loop.drain_rate.per_s, leaving)

    async def __del__(self) -> None:
        if hasattr(self, "_reporting"):
            self._reporting.cancel()
        if hasattr(self, "_exporter"):
            self._exporter.stop()
        if hasattr(self, "_loop"):
            await self._loop.stop()
        if hasattr(self, "_deliveries"):
            self._deliveries.close()
        if hasattr(self, "_group"):
            await self._group.stop()
