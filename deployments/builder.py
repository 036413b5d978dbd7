"""app(config): the only place that makes deployments and binds them to one another."""

from typing import Any

import ray
from ray import serve
from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia
from ray.serve import Application

from cluster.placement import STRATEGY, PlacementError, placement_bundles
from deployments.autoscaling import autoscaling_config
from deployments.config import AppConfig, ArgumentError, api_keys, group_config
from deployments.ingress.ingress import Ingress
from deployments.router.router import Router

STREAMS_PER_INGRESS = 10_000
HEALTH_CHECK_PERIOD_S = 2.0
"""How often Serve's controller looks after a replica. A dead one is replaced after that; Serve's default is 10 s."""


def app(config: AppConfig) -> Application:
    """Return the application: one Ingress over autoscaled Routers, each with its own speculation group.

    Raises:
        ArgumentError: the cluster cannot hold the workers as they are configured, or the API keys are wrong.
    """
    # Read here and passed on: the processes of a running cluster do not have the caller's environment.
    keys = api_keys(config)
    try:
        bundles = placement_bundles(group_config(config), num_gpus=_count_gpus())
    except PlacementError as error:
        raise ArgumentError(str(error)) from None
    scaling = autoscaling_config(config.autoscaling)
    router: Any = serve.deployment(
        Router,
        name="Router",
        ray_actor_options={"num_cpus": bundles[0]["CPU"]},
        placement_group_bundles=bundles,
        placement_group_strategy=STRATEGY,
        # More than the engine admits: the engine refuses with 429, where Serve's own queue would make requests wait.
        max_ongoing_requests=2 * (config.pair.max_num_seqs + config.pair.max_queued_requests),
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        max_constructor_retry_count=1,
        logging_config={"enable_access_log": False},  # the Ingress logs each request
        **({"autoscaling_config": scaling} if scaling else {"num_replicas": config.autoscaling.min_replicas}),
    )
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=STREAMS_PER_INGRESS,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        max_constructor_retry_count=1,
    )
    application: Application = ingress.bind(config, router.bind(config), keys=keys)
    return application


def _count_gpus() -> float:
    """Return the GPUs of the cluster; before one is started, those of this machine, which will be the cluster."""
    if ray.is_initialized():
        return float(ray.cluster_resources().get("GPU", 0))
    # Counted as Ray will count them. torch could, too, but takes seconds to import.
    present, visible = Nvidia.get_current_node_num_accelerators(), Nvidia.get_current_process_visible_accelerator_ids()
    return float(present if visible is None else min(present, len(visible)))
