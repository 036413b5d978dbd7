"""app(config): the only place that makes deployments and binds them to one another."""

import logging
from typing import Any

import ray
from ray import serve
from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia
from ray._private.utils import get_num_cpus
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.capacity import Node, Slot, cluster_nodes, missing, place_groups, slots
from cluster.placement import STRATEGY, PlacementError, label_selectors, placement_bundles
from deployments.autoscaling import autoscaling_config
from deployments.config import AppConfig, ArgumentError, api_keys, group_config
from deployments.ingress.draining import LAST_WORDS_S
from deployments.ingress.ingress import Ingress
from deployments.ingress.request_router import QueueDepthRouter
from deployments.json_log import serve_logging
from deployments.rollout import ingress_settings, router_settings, surge_percent, with_version_of
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
CPUS_PER_INGRESS = 8
MAX_INGRESS_REPLICAS = 4
"""Where the setting does not say how many."""


def app(config: AppConfig) -> Application:
    """Return the application, for a cluster that may gain nodes: replicas without room wait for them.

    Raises:
        ArgumentError: the cluster cannot hold the workers as they are configured, or the API keys are wrong.
    """
    return build(config, can_grow=True)


def build(config: AppConfig, *, can_grow: bool) -> Application:
    """Return the application: Ingress replicas over autoscaled Routers, each with its own speculation group.

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
    num_ingress_replicas = config.num_ingress_replicas or _num_ingress_replicas(nodes)
    _check_room(config, num_ingress_replicas, slots(group, bundles), nodes, can_grow=can_grow)
    router_surge, ingress_surge = _surges(config, num_ingress_replicas, slots(group, bundles), nodes)
    router_config, ingress_config = router_settings(config), ingress_settings(config)
    log = serve_logging(config.log_format)
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
        graceful_shutdown_timeout_s=drain_timeout_s + LAST_WORDS_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=config.hang_timeout_s / FAILED_CHECKS,
        max_constructor_retry_count=START_TRIES,
        request_router_config=RequestRouterConfig(request_router_class=QueueDepthRouter),  # type: ignore[arg-type]
        max_surge_percent=router_surge,
        logging_config={**log, "enable_access_log": False},  # the Ingress logs each request
        **({"autoscaling_config": scaling} if scaling else {"num_replicas": config.autoscaling.min_replicas}),
    )
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=num_ingress_replicas,
        ray_actor_options={"num_cpus": INGRESS_CPUS, "label_selector": config.label_selector.ingress},
        max_ongoing_requests=STREAMS_PER_INGRESS,
        graceful_shutdown_timeout_s=config.drain_timeout_s + LAST_WORDS_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        max_constructor_retry_count=START_TRIES,
        max_surge_percent=ingress_surge,
        logging_config=log,
    )
    routers = with_version_of(router, router_config).bind(router_config)
    application: Application = with_version_of(ingress, ingress_config, keys).bind(ingress_config, routers, keys=keys)
    return application


def _ingress_slot(config: AppConfig) -> Slot:
    return Slot("an Ingress replica", {"CPU": INGRESS_CPUS}, config.label_selector.ingress)


def _num_ingress_replicas(nodes: dict[str, Node]) -> int:
    num_cpus = sum(node.resources.get("CPU", 0) for node in nodes.values())
    return min(MAX_INGRESS_REPLICAS, max(1, int(num_cpus / CPUS_PER_INGRESS)))


def _surges(config: AppConfig, num_ingress_replicas: int, group: list[Slot], nodes: dict[str, Node]) -> tuple[int, int]:
    """Return how many Routers and how many Ingresses, in percent, may start before those that they replace stop.

    The nodes are taken to be there for this application alone.
    """
    num_routers = config.autoscaling.upper_bound
    ingress = [_ingress_slot(config)]
    num_placed, rest = place_groups(ingress, nodes, limit=2 * num_ingress_replicas)
    room, _ = place_groups(group, rest, limit=2 * num_routers)
    beside_one, _ = place_groups(group, place_groups(ingress, nodes, limit=num_ingress_replicas)[1], limit=num_routers)
    has_room_for_two = num_placed == 2 * num_ingress_replicas and room >= beside_one
    return surge_percent(num_routers, room), 100 if has_room_for_two else 0


def _check_room(
    config: AppConfig, num_ingress_replicas: int, group: list[Slot], nodes: dict[str, Node], *, can_grow: bool
) -> None:
    """Warn of replicas that find no room; refuse if the smallest number of them finds none and never will."""
    ingress = [_ingress_slot(config)]
    room, nodes = place_groups(ingress, nodes, limit=num_ingress_replicas)
    if room < num_ingress_replicas:
        setting = f"num_ingress_replicas is {num_ingress_replicas}"
        _report_shortage(setting, room, missing(ingress, nodes), is_fatal=not can_grow, can_grow=can_grow)
    bounds = config.autoscaling
    room, free = place_groups(group, nodes, limit=bounds.upper_bound)
    if room < bounds.upper_bound:
        is_short = room < bounds.min_replicas
        bound = f"min_replicas is {bounds.min_replicas}" if is_short else f"max_replicas is {bounds.upper_bound}"
        is_fatal = is_short and not can_grow
        _report_shortage(f"autoscaling.{bound}", room, missing(group, free), is_fatal=is_fatal, can_grow=can_grow)


def _report_shortage(setting: str, room: int, shortages: list[str], *, is_fatal: bool, can_grow: bool) -> None:
    message = f"{setting}, but the cluster has room for {room}: {'; '.join(shortages)}"
    if is_fatal:
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
