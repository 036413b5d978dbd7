"""app(config): the only place that makes deployments and binds them to one another."""

import logging
from typing import Any

import ray
from ray import serve
from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia
from ray._private.utils import get_num_cpus
from ray.serve import Application

from cluster.capacity import Node, Slot, cluster_nodes, missing, place_groups, slots
from cluster.placement import STRATEGY, PlacementError, label_selectors, placement_bundles
from deployments.autoscaling import autoscaling_config
from deployments.config import AppConfig, ArgumentError, api_keys, group_config
from deployments.ingress.ingress import Ingress
from deployments.router.router import Router

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

STREAMS_PER_INGRESS = 10_000
HEALTH_CHECK_PERIOD_S = 2.0
"""How often Serve's controller looks after a replica. A dead one is replaced after that; Serve's default is 10 s."""
START_TRIES = 3
"""How often a replica's first start is tried. After a restart of Serve's controller each start counts as the first, so
with a single try a worker that is killed at that moment would end the service for good."""
FAILED_CHECKS = 3
"""After how many failed health checks in a row Serve replaces a replica."""
INGRESS_CPUS = 0.1


def app(config: AppConfig) -> Application:
    """Return the application, for a cluster that may gain nodes: replicas without room wait for them.

    Raises:
        ArgumentError: the cluster cannot hold the workers as they are configured, or the API keys are wrong.
    """
    return build(config, can_grow=True)


def build(config: AppConfig, *, can_grow: bool) -> Application:
    """Return the application: one Ingress over autoscaled Routers, each with its own speculation group.

    Raises:
        ArgumentError: the cluster cannot hold the workers as they are configured, or the API keys are wrong.
    """
    # Read here and passed on: the processes of a running cluster do not have the caller's environment.
    keys = api_keys(config)
    group, nodes = group_config(config), _nodes()
    try:
        bundles = placement_bundles(group, num_gpus=sum(node.resources.get("GPU", 0) for node in nodes.values()))
        selectors = label_selectors(group, bundles)
    except PlacementError as error:
        raise ArgumentError(str(error)) from None
    _check_room(config, slots(group, bundles), nodes, can_grow=can_grow)
    scaling = autoscaling_config(config.autoscaling)
    drain_timeout_s = config.drain_timeout_s
    if scaling is not None:
        # No stream takes longer than its request may, so a replica that autoscaling removes cuts none.
        drain_timeout_s = max(drain_timeout_s, config.limits.request_timeout_s)
    router: Any = serve.deployment(
        Router,
        name="Router",
        ray_actor_options={"num_cpus": bundles[0]["CPU"]},
        placement_group_bundles=bundles,
        placement_group_strategy=STRATEGY,
        placement_group_bundle_label_selector=selectors,
        # More than the engine admits: the engine refuses with 429, where Serve's own queue would make requests wait.
        max_ongoing_requests=2 * (config.pair.max_num_seqs + config.pair.max_queued_requests),
        graceful_shutdown_timeout_s=drain_timeout_s,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=config.hang_timeout_s / FAILED_CHECKS,
        max_constructor_retry_count=START_TRIES,
        logging_config={"enable_access_log": False},  # the Ingress logs each request
        **({"autoscaling_config": scaling} if scaling else {"num_replicas": config.autoscaling.min_replicas}),
    )
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        max_ongoing_requests=STREAMS_PER_INGRESS,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        max_constructor_retry_count=START_TRIES,
    )
    application: Application = ingress.bind(config, router.bind(config), keys=keys)
    return application


def _check_room(config: AppConfig, group: list[Slot], nodes: dict[str, Node], *, can_grow: bool) -> None:
    """Warn of replicas that find no room; refuse if the smallest number of them finds none and never will."""
    bounds = config.autoscaling
    _, nodes = place_groups([Slot("the Ingress", {"CPU": INGRESS_CPUS}, {})], nodes, limit=1)
    room, free = place_groups(group, nodes, limit=bounds.upper_bound)
    if room == bounds.upper_bound:
        return
    is_short = room < bounds.min_replicas
    bound = f"min_replicas is {bounds.min_replicas}" if is_short else f"max_replicas is {bounds.upper_bound}"
    shortages = "; ".join(missing(group, free))
    message = f"autoscaling.{bound}, but the cluster has room for {room}: {shortages}"
    if is_short and not can_grow:
        raise ArgumentError(message)
    consequence = "the others wait for more nodes" if can_grow else "no more will start"
    logger.warning("%s; %s", message, consequence)


def _nodes() -> dict[str, Node]:
    """Return the resources of the cluster's nodes; before it is started, of this machine, which will be all of it."""
    if ray.is_initialized():
        return cluster_nodes()
    # Counted as Ray will count them. torch could, too, but takes seconds to import.
    present, visible = Nvidia.get_current_node_num_accelerators(), Nvidia.get_current_process_visible_accelerator_ids()
    resources = {"CPU": get_num_cpus(), "GPU": float(present if visible is None else min(present, len(visible)))}
    if resources["GPU"] and (accelerator_type := Nvidia.get_current_node_accelerator_type()):
        resources[f"accelerator_type:{accelerator_type}"] = 1.0
    return {"this machine": Node(resources)}
