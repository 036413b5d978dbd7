"""The queue-depth policy: the number of replicas follows the number of waiting and running sequences.

Serve's own policy counts calls, but one call may have several prompts and `n` choices each. This one reacts to a step
in load within 3 s, Serve's defaults within 14 s: a replica records its numbers every 0.2 s and sends them every 0.4 s,
their mean over a second rises within 1 s, the upscale delay is 1 s, and the controller's loop takes 0.1 s.
"""

import math
import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.config import Autoscaling
from deployments.wire import IS_RECOVERING, NUM_REQUESTS

CALM = 0.8
"""Replicas are removed only if the rest would have at most this part of `requests_per_replica`."""
_LOOK_BACK_S = 1.0
_PUSH_INTERVAL_S = 0.4


class QueueDepthPolicy:
    """Chooses the number of replicas; Serve applies bounds and delays. It runs in Serve's controller.

    The current number includes starting replicas but no draining ones. Replicas that restart their target are counted
    on top of what the load needs.
    """

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


def autoscaling_config(settings: Autoscaling) -> AutoscalingConfig | None:
    """Return Serve's autoscaling settings; None is a fixed number of replicas."""
    if settings.upper_bound == settings.min_replicas:
        return None
    with warnings.catch_warnings():
        # It says that environment variables will replace metrics_interval_s; in Ray 2.60 they have no effect.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.upper_bound,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            look_back_period_s=_LOOK_BACK_S,
            metrics_interval_s=_PUSH_INTERVAL_S,
            policy=AutoscalingPolicy(
                policy_function=QueueDepthPolicy, policy_kwargs={"requests_per_replica": settings.requests_per_replica}
            ),
        )
