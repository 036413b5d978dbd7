"""The policy, without Serve."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingContext

from deployments.autoscaling import (
    IS_RECOVERING,
    NUM_REQUESTS,
    UTILISATION,
    QueueDepthPolicy,
    UtilisationPolicy,
    autoscaling_config,
)
from deployments.config import Autoscaling, PoolSize

POLICY = QueueDepthPolicy(requests_per_replica=10)


def context(
    requests: dict[str, float], *, target: int = 1, queued: float = 0.0, recovering: dict[str, float] | None = None
) -> AutoscalingContext:
    metrics = {NUM_REQUESTS: requests, IS_RECOVERING: recovering or dict.fromkeys(requests, 0.0)} if requests else {}
    context: Any = SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued, target_num_replicas=target)
    return context  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("requests", "queued", "expected"),
    [
        ({"a": 0.0}, 0, 1),
        ({"a": 10.2}, 0, 1),
        ({"a": 10.9}, 0, 2),
        ({"a": 10.0, "b": 11.0}, 0, 3),
        ({"a": 9.0}, 3.0, 2),
    ],
    ids=["idle", "full for a moment", "too many", "two replicas", "waiting for a replica"],
)
def test_replicas_follow_the_queue_depth(requests: dict[str, float], queued: float, expected: int) -> None:
    assert POLICY(context(requests, queued=queued)) == (expected, {})


def test_nothing_changes_while_no_replica_has_reported() -> None:
    assert POLICY(context({}, target=3, queued=99.0)) == (3, {})


@pytest.mark.parametrize(
    ("num_requests", "target", "expected"), [(16, 2, 2), (9, 2, 2), (8, 2, 1), (0, 5, 1), (25, 4, 4), (24, 4, 3)]
)
def test_replicas_go_only_when_fewer_would_have_room_to_spare(num_requests: int, target: int, expected: int) -> None:
    assert POLICY(context({"a": num_requests}, target=target))[0] == expected


@pytest.mark.parametrize(
    ("requests", "expected"), [({"a": 6.0, "b": 2.0}, 2), ({"a": 6.0, "b": 5.0}, 3), ({"a": 0.0, "b": 0.0}, 1)]
)
def test_a_replica_that_recovers_comes_on_top_of_those_that_the_load_needs(
    requests: dict[str, float], expected: int
) -> None:
    assert POLICY(context(requests, target=2, recovering={"a": 1.0, "b": 0.0}))[0] == expected


@pytest.mark.parametrize(
    "fixed", [Autoscaling(), Autoscaling(min_replicas=3, max_replicas=3), PoolSize(replicas=2)], ids=str
)
def test_a_fixed_number_of_replicas_does_not_scale(fixed: Autoscaling | PoolSize) -> None:
    assert autoscaling_config(fixed) is None


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        (Autoscaling(min_replicas=2, max_replicas=5, requests_per_replica=7, downscale_delay_s=9.0), QueueDepthPolicy),
        (PoolSize(replicas=2, max_replicas=5), UtilisationPolicy),
    ],
)
def test_serve_gets_the_policy_and_the_bounds(
    settings: Autoscaling | PoolSize, policy: type, recwarn: pytest.WarningsRecorder
) -> None:
    config = autoscaling_config(settings)
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert config.policy.get_policy() is policy or isinstance(config.policy.get_policy(), policy)
    assert config.policy.policy_kwargs == ({"requests_per_replica": 7} if policy is QueueDepthPolicy else {})
    if isinstance(settings, Autoscaling):  # a load that comes and goes moves nothing
        assert config.downscale_delay_s == settings.downscale_delay_s
    assert not recwarn.list


def num_workers(busy: list[float], target: int) -> int:
    metrics = {UTILISATION: {str(number): value for number, value in enumerate(busy)}} if busy else {}
    context: Any = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)
    return UtilisationPolicy()(context)[0]


@pytest.mark.parametrize(
    ("busy", "target", "expected"),
    [
        ([], 2, 2),
        ([0.0], 1, 1),
        ([0.7], 1, 1),
        ([0.75], 1, 2),
        ([1.0, 1.0], 2, 3),
        ([1.0], 2, 2),
        ([0.25, 0.2], 2, 2),
        ([0.2, 0.2], 2, 1),
    ],
    ids=str,
)
def test_draft_workers_follow_their_utilisation(busy: list[float], target: int, expected: int) -> None:
    assert num_workers(busy, target) == expected


def test_draft_workers_settle_under_a_steady_load() -> None:
    """Their number does not swing between two values, from wherever it starts."""
    for load, target in itertools.product((number / 20 for number in range(61)), range(1, 6)):
        seen = [target]
        for _ in range(8):
            seen.append(num_workers([min(1.0, load / seen[-1])] * seen[-1], seen[-1]))
        assert len(set(seen[-3:])) == 1
