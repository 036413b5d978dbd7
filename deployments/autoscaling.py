"""Autoscaling: Routers by their waiting and running sequences, draft workers by their utilisation.

Serve's own policy counts calls, which may have many sequences, and reacts within 14 s; this policy reacts within 3 s.
"""

import math
import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.config import Autoscaling, PoolSize
from deployments.wire import IS_RECOVERING, NUM_REQUESTS, UTILISATION

CALM = 0.8
"""Replicas are removed only if the remaining replicas would have at most this share of `requests_per_replica`."""
BUSY, IDLE = 0.7, 0.4
"""Draft workers are added above a utilisation of `BUSY`, and removed if the remaining workers stay below `IDLE`."""
_UPSCALE_DELAY_S = 1.0
_POOL_DELAYS_S = (10.0, 300.0)
_LOOK_BACK_S = 1.0
_PUSH_INTERVAL_S = 0.4


class QueueDepthPolicy:
    """Chooses the number of Routers, in Serve's controller; Routers that restart their target come on top."""

    def __init__(self, requests_per_replica: int) -> None:
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        metrics = context.aggregated_metrics or {}
        reported = metrics.get(NUM_REQUESTS, {})
        if not reported:
            return context.target_num_replicas, {}  # all replicas are starting, or have just started
        # Serve's handles queue requests while no replica can take them.
        num_requests = round(sum(reported.values()) + context.total_queued_requests)
        num_recovering = sum(value > 0.5 for value in metrics.get(IS_RECOVERING, {}).values())

        def replicas(capacity: int) -> int:
            num_working = math.ceil(num_requests / capacity)
            return num_working + num_recovering if num_working else 1

        num_replicas, target = replicas(self._requests_per_replica), context.target_num_replicas
        if num_replicas < target:
            # Load that varies around a threshold must not add and remove replicas in turn.
            num_replicas = min(target, replicas(max(1, math.floor(CALM * self._requests_per_replica))))
        return num_replicas, {}


class UtilisationPolicy:
    """Chooses the number of draft workers of a pool, by the share of time in which each drafts."""

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of workers, and no state."""
        reported, target = (context.aggregated_metrics or {}).get(UTILISATION, {}), context.target_num_replicas
        if not reported:
            return target, {}
        busy = sum(reported.values())
        num_workers = max(1, math.ceil(busy / BUSY))
        return num_workers if num_workers > target else min(target, max(1, math.ceil(busy / IDLE))), {}


def autoscaling_config(settings: Autoscaling | PoolSize) -> AutoscalingConfig | None:
    """Return Serve's autoscaling settings for Routers or draft workers; None keeps their number fixed."""
    if isinstance(settings, Autoscaling):
        lower_bound, delays_s = settings.min_replicas, (_UPSCALE_DELAY_S, settings.downscale_delay_s)
        sizes = {"requests_per_replica": settings.requests_per_replica}
        policy = AutoscalingPolicy(policy_function=QueueDepthPolicy, policy_kwargs=sizes)
    else:
        lower_bound, delays_s = settings.replicas, _POOL_DELAYS_S
        policy = AutoscalingPolicy(policy_function=UtilisationPolicy)
    if lower_bound == settings.upper_bound:
        return None
    with warnings.catch_warnings():
        # The warning names environment variables for metrics_interval_s; in Ray 2.60 they have no effect.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=lower_bound,
            max_replicas=settings.upper_bound,
            upscale_delay_s=delays_s[0],
            downscale_delay_s=delays_s[1],
            look_back_period_s=_LOOK_BACK_S,
            metrics_interval_s=_PUSH_INTERVAL_S,
            policy=policy,
        )
