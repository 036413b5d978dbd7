"""The queue-depth policy: the number of replicas follows the number of requests, waiting and running.

Serve's own policy counts calls, but one call may have several prompts and `n` choices each, so replicas report the
number of their sequences.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.config import Autoscaling

NUM_REQUESTS = "num_requests"


class QueueDepthPolicy:
    """Chooses the number of replicas; Serve applies bounds and delays. It runs in Serve's controller."""

    def __init__(self, requests_per_replica: int) -> None:
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        reported = (context.aggregated_metrics or {}).get(NUM_REQUESTS, {})
        num_requests = sum(reported.values()) if reported else context.total_num_requests
        return max(1, math.ceil(num_requests / self._requests_per_replica)), {}


def autoscaling_config(settings: Autoscaling) -> AutoscalingConfig | None:
    """Return Serve's autoscaling settings; None is a fixed number of replicas."""
    if settings.max_replicas <= settings.min_replicas:
        return None
    return AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        policy=AutoscalingPolicy(
            policy_function=QueueDepthPolicy,
            policy_kwargs={"requests_per_replica": settings.requests_per_replica},
        ),
    )
