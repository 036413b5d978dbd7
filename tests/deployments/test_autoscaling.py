from types import SimpleNamespace

import pytest

from deployments.autoscaling import NUM_REQUESTS, QueueDepthPolicy, autoscaling_config
from deployments.config import Autoscaling


@pytest.mark.parametrize(
    ("reported", "total", "expected"),
    [({}, 0, 1), ({}, 25, 3), ({"a": 10.0, "b": 11.0}, 0, 3), ({"a": 10.0}, 99, 1), ({"a": 0.0}, 99, 1)],
)
def test_replicas_follow_the_queue_depth(reported: dict[str, float], total: float, expected: int) -> None:
    metrics = {NUM_REQUESTS: reported} if reported else {}
    context = SimpleNamespace(aggregated_metrics=metrics, total_num_requests=total)
    assert QueueDepthPolicy(requests_per_replica=10)(context) == (expected, {})  # type: ignore[arg-type]


def test_one_replica_does_not_scale() -> None:
    assert autoscaling_config(Autoscaling()) is None


def test_serve_gets_the_policy_and_the_bounds() -> None:
    config = autoscaling_config(Autoscaling(min_replicas=2, max_replicas=5, requests_per_replica=7))
    assert config is not None
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert config.policy.policy_kwargs == {"requests_per_replica": 7}
