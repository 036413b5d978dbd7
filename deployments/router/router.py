"""Router: owns the sequences, runs the engine over its own speculation group, streams committed tokens."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from prometheus_client import Metric

from cluster.group import SpeculationGroup
from cluster.transport import ConnectionLostError, InboxAddress
from deployments.autoscaling import IS_RECOVERING, NUM_REQUESTS
from deployments.config import AppConfig, group_config
from deployments.metrics import RouterMetrics
from deployments.router.delivery import Deliveries
from deployments.router.generation import Description, Generation, ModelLimits
from deployments.router.round_loop import RoundLoop
from engine.engine import Engine
from engine.errors import TargetError
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
        self._deliveries = Deliveries()
        self._description = Description(
            target=target,
            draft=self._group.draft_info,
            limits=ModelLimits(target.vocab_size, self._engine.max_model_len, settings.engine.num_speculative_tokens),
        )
        logger.info("ready after %.1f s", time.monotonic() - started)

    async def generate(self, request: Generation, inbox: InboxAddress) -> AsyncGenerator[int, None]:
        """Generate a request's tokens, and send them to its Ingress's inbox; Serve closes this when the client leaves.

        Yields:
            How many outputs were sent: once, after the last one.

        Raises:
            Exception: what `RoundLoop.generate` raises, after the number of outputs if there were any.
            TargetError: the inbox cannot be reached.
        """
        delivery = self._deliveries.to(inbox)
        num_sent = 0
        try:
            async with aclosing(self._loop.generate(request)) as rounds:
                async for outputs in rounds:
                    await delivery.put(outputs)
                    num_sent += len(outputs)
        except ConnectionLostError as error:
            raise TargetError(f"the Ingress cannot be reached: {error}") from error
        except Exception:
            if num_sent:
                yield num_sent
            raise
        yield num_sent

    async def describe(self) -> Description:
        """Return what this replica serves."""
        return self._description

    async def collect(self) -> list[Metric]:
        """Return this replica's metrics."""
        return self._metrics.collect()

    async def check_progress(self) -> None:
        """Raise unless rounds are being finished while there is work.

        Raises:
            TargetError: no progress.
        """
        self._loop.check()

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

    async def __del__(self) -> None:
        if hasattr(self, "_loop"):
            await self._loop.stop()
        if hasattr(self, "_deliveries"):
            self._deliveries.close()
        if hasattr(self, "_group"):
            await self._group.stop()
