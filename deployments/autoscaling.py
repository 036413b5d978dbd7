"""The queue-depth policy: the number of replicas follows the number of requests, waiting and running.

Serve's own policy counts calls, but one call may have several prompts and `n` choices each, so replicas report the
number of their sequences. A step in load is decided on within 3 seconds: a replica records its numbers every 0.2 s and
sends them every 0.4 s, their mean over the last second has risen far enough after 1 s at the latest, the upscale delay
is 1 s, and the controller's loop takes 0.1 s. Serve's defaults take 14 s.
"""

import math
import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.config import Autoscaling

NUM_REQUESTS = "num_requests"
IS_RECOVERING = "is_recovering"

CALM = 0.8
"""Part of `requests_per_replica` that fewer replicas must be able to stay below, before any is removed."""
_LOOK_BACK_S = 1.0
_PUSH_INTERVAL_S = 0.4


class QueueDepthPolicy:
    """Chooses the number of replicas; Serve applies bounds and delays. It runs in Serve's controller.

    Replicas that are starting are part of the current target already. Serve reports nothing of replicas that are
    draining, and a replica that restarts its target comes on top of those that the load needs.
    """

    def __init__(self, requests_per_replica: int) -> None:
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        metrics = context.aggregated_metrics or {}
        reported = metrics.get(NUM_REQUESTS, {})
        if not reported:
            return context.target_num_replicas, {}  # nothing is known: all replicas are starting, or just did
        # Serve's handles queue requests while no replica can take them.
        num_requests = round(sum(reported.values()) + context.total_queued_requests)
        num_recovering = sum(value > 0.5 for value in metrics.get(IS_RECOVERING, {}).values())
        return self.decide(num_requests, num_recovering, context.target_num_replicas), {}

    def decide(self, num_requests: int, num_recovering: int, target: int) -> int:
        """Return the number of replicas for so many requests, given the present target number.

        Args:
            num_recovering: replicas that cannot work at present; those that can must be enough.
        """
        num_replicas = self._replicas(num_requests, self._requests_per_replica, num_recovering)
        if num_replicas >= target:
            return num_replicas
        # Load that varies around a threshold must not add and remove replicas in turn.
        calm = max(1, math.floor(CALM * self._requests_per_replica))
        return min(target, self._replicas(num_requests, calm, num_recovering))

    @staticmethod
    def _replicas(num_requests: int, capacity: int, num_recovering: int) -> int:
        num_working = math.ceil(num_requests / capacity)
        return num_working + num_recovering if num_working else 1


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
                policy_function=QueueDepthPolicy,
                policy_kwargs={"requests_per_replica": settings.requests_per_replica},
            ),
        )
